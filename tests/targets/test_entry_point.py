"""The README's lines that register a target are true: a package with just them is found by name and checked."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs PyTorch: pip install 'verikda[torch]'")

HERE = Path(__file__).parent
README = (HERE.parent.parent / "README.md").read_text(encoding="utf-8")


def test_a_package_with_the_lines_of_the_readme_is_a_target(tmp_path):
    (block,) = [b for b in re.findall(r"```toml\n(.*?)```", README, re.DOTALL) if "verikda.targets" in b]
    ((name, value),) = tomllib.loads(block)["project"]["entry-points"]["verikda.targets"].items()
    module, function = value.split(":")
    place = tmp_path / (module.replace(".", "/") + ".py")
    place.parent.mkdir(parents=True)
    place.write_text(f"from toy_kda import chunk_kda as {function}\n")
    info = tmp_path / "mypackage-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mypackage\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[verikda.targets]\n{name} = {value}\n")
    script = (
        "import calls\n"
        "from verikda.targets import available, resolve\n"
        f"print([(t.name, t.description) for t in available() if t.name == {name!r}])\n"
        f"print(resolve({name!r}).run(calls.make(shape=(1, 3, 1, 1, 2, 2))).outputs['o'].shape)\n"
    )
    path = [str(p) for p in (tmp_path, HERE, HERE.parent.parent)]
    run = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {path!r}\n{script}"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == [f"[('{name}', '{value}, registered by mypackage 1.0')]", "(1, 3, 1, 2)"]
