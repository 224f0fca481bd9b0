"""Bad input over every public surface, one table: what is given, how it is refused, and what the sentence says.

Whatever is refused is refused with one line that names the value seen; nothing ends in a traceback, and nothing is
taken silently. Surfaces with tables of their own have a few rows here: `Case` (test_case.py) and the operators
(ops/test_ops_messages.py).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import verikda
from oracles.contract import Contract, storage16
from oracles.problem import Problem
from oracles.validate import check_problem
from verikda.case import Case
from verikda.checks import named
from verikda.choose import choose, choose_listed
from verikda.cli import main
from verikda.dtypes import round_to, to_hex
from verikda.floor import judge
from verikda.inputs import make_call
from verikda.strategies import cases
from verikda.targets import contract_by_name, resolve
from verikda.worst import Corpus

ROOT = Path(__file__).parents[1]
UNUSABLE, USAGE = 2, 4  # exit statuses of the command and of pytest

Said = tuple[int, str]
Try = Callable[[Path], Any]
"""Takes a folder of its own; raises, or returns exit status and message."""


def command(*words: str) -> Try:
    """The command line; {d} is the folder, which holds an empty folder `sub` and a file `file`."""

    def attempt(folder: Path) -> Said:
        (folder / "sub").mkdir()
        (folder / "file").write_text("x")
        result = CliRunner().invoke(main, [w.replace("{d}", str(folder)) for w in words])
        assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
        assert result.stdout == "", "refused before anything is done"
        hints = ("Usage: ", "Try '")
        return result.exit_code, "\n".join(
            line for line in result.stderr.splitlines() if line and not line.startswith(hints)
        )

    return attempt


def file(content: bytes | str | dict[str, Any], *more: str) -> Try:
    """`verikda replay` of a file with this content."""

    def attempt(folder: Path) -> Said:
        text = json.dumps(content) if isinstance(content, dict) else content
        (folder / "bad.json").write_bytes(text if isinstance(text, bytes) else text.encode())
        return command("replay", "{d}/bad.json", *more)(folder)

    return attempt


def finding(**changes: Any) -> Try:
    return file({"schema": 1, "target": "zoo", "check": "floor", "case": {"schema": 1}, **changes})


def worst(text: bytes | str | None = None, **changes: Any) -> Try:
    """A corpus with one file."""

    def attempt(folder: Path) -> None:
        data = {"schema": 1, "target": "zoo", "output": "o", "ratio": 2.0, "case": {"schema": 1}} | changes
        content = json.dumps(data) if text is None else text
        (folder / "w.json").write_bytes(content if isinstance(content, bytes) else content.encode())
        Corpus(folder)

    return attempt


def lines(text: str | bytes, *words: str) -> Try:
    """The command line, where `file` holds this text and `point` one line of a report."""

    def attempt(folder: Path) -> Said:
        point = {"schema": 1, "kind": "point", "series": "s", "target": "t", "dtype": "float32", "case": {},
                 "verdict": "pass", "detail": ""}  # fmt: skip
        (folder / "point").write_text(json.dumps(point) + "\n")
        (folder / "lines").write_bytes(text if isinstance(text, bytes) else text.encode())
        before = {path: path.read_bytes() for path in folder.iterdir()}
        said = command(*words)(folder)
        assert before == {path: path.read_bytes() for path in before}, "a refused file is left as it is"
        return said

    return attempt


def pytest_with(*options: str) -> Try:
    """Pytest with the plugin; its lines of error."""

    def attempt(folder: Path) -> Said:
        surroundings = os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        words = [sys.executable, "-m", "pytest", "-p", "verikda.pytest_plugin", "--rootdir", str(folder), *options]
        run = subprocess.run(words, cwd=folder, env=surroundings, capture_output=True, text=True, check=False)
        assert "Traceback" not in run.stdout + run.stderr
        lines = [x for x in run.stderr.splitlines() if "error: " in x.lower() and "usage: " not in x]
        return run.returncode, "\n".join(lines)

    return attempt


def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Try:
    return lambda folder: function(*args, **kwargs)


def z(*shape: int, dtype: Any = np.float64) -> Any:
    return np.zeros(shape, dtype)


PROBLEM = Problem(q=z(1, 4, 2, 3), k=z(1, 4, 2, 3), v=z(1, 4, 2, 5), g=z(1, 4, 2, 3), beta=z(1, 4, 2), scale=1.0)


def problem(**changes: Any) -> Try:
    return lambda folder: check_problem(replace(PROBLEM, **changes))


def op(name: str, **changes: Any) -> Try:
    """A public operator on NumPy arrays that are right but for `changes`; refused before any kernel is compiled."""

    def attempt(folder: Path) -> None:
        given = {n: getattr(PROBLEM, n).astype(np.float32) for n in ("q", "k", "v", "g", "beta")} | changes
        getattr(verikda, name)(**{n: x for n, x in given.items() if x is not ...})

    return attempt


def module(text: str) -> Try:
    """`check bad_target:f` where a module of the current folder has this text."""

    def attempt(folder: Path) -> Said:
        (folder / "bad_target.py").write_text(text)
        sys.modules.pop("bad_target", None)
        before = Path.cwd()
        os.chdir(folder)
        try:
            return command("check", "bad_target:f")(folder)
        finally:
            os.chdir(before)
            sys.modules.pop("bad_target", None)

    return attempt


def nan(x: Any) -> Any:
    x = x.copy()
    x.flat[0] = np.nan
    return x


DEEP = "[" * 100_000
SIGNED = "def f(q, k, v, g, beta{}): ...\n"

TABLE: list[tuple[str, Try, type[Exception] | int, str]] = [
    # the command line: options
    ("command", command("chek"), UNUSABLE, "No such command 'chek'"),
    ("option", command("check", "zoo", "--what"), UNUSABLE, "No such option '--what'"),
    ("two targets", command("check", "zoo", "b"), UNUSABLE, "unexpected extra argument (b)"),
    ("no file", command("replay"), UNUSABLE, "Missing argument 'FILE'"),
    ("cases 0", command("check", "zoo", "--cases", "0"), UNUSABLE, "0 is not in the range x>=1"),
    ("cases text", command("check", "zoo", "--cases", "x"), UNUSABLE, "'x' is not a valid integer"),
    ("jobs 0", command("check", "zoo", "--jobs", "0"), UNUSABLE, "0 is not in the range x>=1"),
    ("seconds 0", command("check", "zoo", "--seconds", "0"), UNUSABLE, "0.0 is not in the range x>0"),
    ("seconds nan", command("check", "zoo", "--seconds", "nan"), UNUSABLE, "nan is not a finite number"),
    ("seconds inf", command("check", "zoo", "--seconds", "inf"), UNUSABLE, "inf is not a finite number"),
    ("seed -1", command("check", "zoo", "--seed", "-1"), UNUSABLE, "-1 is not in the range 0<=x<=4294967295"),
    ("seed 2**32", command("check", "zoo", "--seed", "4294967296"), UNUSABLE, "4294967296 is not in the range"),
    ("profile", command("check", "zoo", "--profile", "fast"), UNUSABLE, "no profile 'fast'; the profiles are dev, ci"),
    ("check name", command("check", "zoo", "--checks", "flor"), UNUSABLE, "no check 'flor'; the checks are floor, "),
    ("no check", command("check", "zoo", "--checks", ","), UNUSABLE, "names no check; give one or more of floor, "),
    ("contract", command("check", "emulator", "--contract", "f8"), UNUSABLE, "'f8' is not known: use one of storage16"),
    ("own contract", command("check", "zoo", "--contract", "float32"), UNUSABLE, "contract 'float32' cannot be set"),
    # the command line: paths
    (
        "record is a folder",
        command("check", "zoo", "--json", "{d}/sub"),
        UNUSABLE,
        "--json {d}/sub is a folder; name a",
    ),
    ("summary is a folder", command("check", "zoo", "--summary", "{d}/sub"), UNUSABLE, "sub is a folder; name a"),
    (
        "findings is a file",
        command("check", "zoo", "--findings", "{d}/file"),
        UNUSABLE,
        "file is a file; name a folder",
    ),
    ("corpus is a file", command("check", "zoo", "--worst", "{d}/file"), UNUSABLE, "file is a file; the corpus of"),
    (
        "no corpus",
        command("check", "zoo", "--worst", "{d}/none"),
        UNUSABLE,
        "--worst {d}/none is no folder; name one",
    ),
    ("file missing", command("replay", "{d}/none.json"), UNUSABLE, "none.json: No such file or directory"),
    ("file is a folder", command("replay", "{d}/sub"), UNUSABLE, "sub: Is a directory"),
    # outputs are refused before anything is measured
    ("page is a folder", command("report", "zoo", "--html", "{d}/sub"), UNUSABLE, "--html {d}/sub is a folder; name"),
    (
        "one page twice",
        command("report", "zoo", "--html", "{d}/p", "--markdown", "{d}/sub/../p"),
        UNUSABLE,
        "p are one file; name two",
    ),
    (
        "page on the record",
        command("report", "zoo", "--json", "{d}/p", "--html", "{d}/p"),
        UNUSABLE,
        "--json {d}/p and --html {d}/p are one",
    ),
    (
        "page on its lines",
        lines("", "report", "--from", "{d}/point", "--html", "{d}/point"),
        UNUSABLE,
        "what --from reads",
    ),
    ("zoo: page", command("zoo", "--kill-matrix", "--report", "{d}/sub"), UNUSABLE, "sub is a folder; name a file"),
    (
        "zoo: page on the record",
        command("zoo", "--compare", "--json", "{d}/p", "--report", "{d}/p"),
        UNUSABLE,
        "one file",
    ),
    ("bench: page", command("bench", "--summary", "{d}/sub"), UNUSABLE, "--summary {d}/sub is a folder; name a file"),
    ("bench: times", command("bench", "--benchmark-json", "{d}/sub"), UNUSABLE, "--benchmark-json {d}/sub is a folder"),
    ("bench: cpu", command("bench", "--cpu", "fla", "--modes", "forward"), UNUSABLE, "leave out TARGETS, --modes"),
    ("probe: tokens", command("probe", "emulator", "--tokens", "9" * 15), UNUSABLE, "use fewer tokens"),
    # lines of earlier runs
    (
        "record of others",
        lines("x\n", "check", "zoo", "--json", "{d}/lines"),
        UNUSABLE,
        "no JSON Lines of verikda; name",
    ),
    (
        "record: a case",
        lines('{"schema": 1, "lengths": [5]}\n', "check", "zoo", "--json", "{d}/lines"),
        UNUSABLE,
        "no JSON Lines of verikda; name",
    ),
    ("summary of others", lines("<html>", "check", "zoo", "--summary", "{d}/lines"), UNUSABLE, "holds b'<html>'"),
    (
        "no field",
        lines('{"schema":1,"kind":"point"}\n', "report", "--from", "{d}/lines"),
        UNUSABLE,
        "series of a line of",
    ),
    (
        "no such field",
        lines('{"schema":1,"kind":"timing"}\n', "diff", "{d}/point", "{d}/lines"),
        UNUSABLE,
        "is missing",
    ),
    (
        "field of another type",
        lines('{"schema":1,"kind":"end","interrupted":3}\n', "report", "--from", "{d}/lines"),
        UNUSABLE,
        "interrupted of a line of kind 'end' is 3; measure again",
    ),
    (
        "inside a field",
        lines(
            '{"schema":1,"kind":"timing","target":"x","workload":{},"times":{"f":3}}\n',
            "diff",
            "{d}/point",
            "{d}/lines",
        ),
        UNUSABLE,
        "lines: a line of kind 'timing' is not as verikda writes it (TypeError: ",
    ),
    (
        "zoo: no field",
        lines('{"kind":"zoo"}\n', "zoo", "--kill-matrix", "--json", "{d}/lines"),
        UNUSABLE,
        "no record of",
    ),
    ("zoo: kill", lines('{"kind":"kill"}\n', "zoo", "--kill-matrix", "--json", "{d}/lines"), UNUSABLE, "no record of"),
    ("zoo: rival", lines('{"kind":"rival"}\n', "zoo", "--compare", "--json", "{d}/lines"), UNUSABLE, "no record of"),
    ("zoo: not UTF-8", lines(b"\xff", "zoo", "--compare", "--json", "{d}/lines"), UNUSABLE, "lines is not UTF-8 text"),
    # targets
    ("unknown target", command("check", "nope"), UNUSABLE, "target 'nope' is not known: use one of verikda, "),
    ("empty target", command("check", ""), UNUSABLE, "target '' is not known"),
    ("unknown fault", command("check", "zoo:DV_OF"), UNUSABLE, "no fault 'DV_OF'; did you mean DV_OFF"),
    ("no module name", command("check", ":f"), UNUSABLE, "':f' is not of the form package.module:function"),
    ("no function name", command("check", "json:"), UNUSABLE, "'json:' is not of the form package.module:function"),
    ("a path", command("check", "./a/b.py:f"), UNUSABLE, "'./a/b.py' is not a module name"),
    ("no module", command("check", "no_such:f"), UNUSABLE, "no module named no_such: install it, or run from"),
    ("no attribute", command("check", "json:nof"), UNUSABLE, "has no 'nof'; its callables are: JSONDecoder"),
    ("not callable", command("check", "os.path:sep"), UNUSABLE, "os.path:sep is a str, neither a function nor"),
    ("other signature", command("check", "json:dumps"), UNUSABLE, "(obj, skipkeys, ensure_ascii, "),
    ("needs more", module(SIGNED.format(", mask")), UNUSABLE, "bad_target:f requires mask, which a call cannot"),
    ("fails on import", module("1 / 0\n"), UNUSABLE, "importing bad_target failed: ZeroDivisionError: division"),
    ("no text", module("raise type('E', (OSError,), {'__str__': None})\n"), UNUSABLE, "E, whose text cannot be"),
    ("no Python", module("def f(:\n"), UNUSABLE, "importing bad_target failed: SyntaxError: "),
    ("arrays", module(SIGNED.format("") + "f.verikda_arrays = 'jax'"), UNUSABLE, "verikda_arrays is 'jax'; use"),
    ("ability", module(SIGNED.format("") + "f.verikda_capabilities = {'fp8': True}"), UNUSABLE, "has no field fp8"),
    (
        "abilities",
        module(SIGNED.format("") + "f.verikda_capabilities = ['dht']"),
        UNUSABLE,
        "maps fields of Capabilities",
    ),
    ("able", module(SIGNED.format("") + "f.verikda_capabilities = {'dht': 'no'}"), UNUSABLE, "has dht = 'no'; it must"),
    ("text", module(SIGNED.format("") + "f.verikda_capabilities = {'gates': 'log'}"), UNUSABLE, "has gates = 'log'"),
    ("device", call(resolve, "zoo", device="cuda:7"), verikda.targets.TargetError, "device 'cuda:7' cannot be set"),
    # case files
    ("file empty", file("", "zoo"), UNUSABLE, "not JSON: Expecting value: line 1 column 1"),
    ("file cut off", file('{"schema": 1, "K"', "zoo"), UNUSABLE, "not JSON: Expecting ':' delimiter"),
    ("file is a list", file("[1]", "zoo"), UNUSABLE, "the file holds list, not a JSON object"),
    ("not UTF-8", file(b'{"schema": 1}\xff', "zoo"), UNUSABLE, "is not UTF-8 text (byte 13)"),
    ("byte order mark", file(b'\xef\xbb\xbf{"schema": 1}', "zoo"), UNUSABLE, "UTF-8 BOM"),
    ("too large", file(" " * 2**20 + "{}", "zoo"), UNUSABLE, "1048578 characters, at most 1048576"),
    ("too deep", file(DEEP, "zoo"), UNUSABLE, "nested too deeply"),
    ("too many digits", file(f'{{"schema": 1, "K": {"1" * 30}}}', "zoo"), UNUSABLE, "30 digits"),
    ("NaN", file('{"schema": 1, "scale": NaN}', "zoo"), UNUSABLE, "NaN is not JSON"),
    ("Infinity", file('{"schema": 1, "scale": -Infinity}', "zoo"), UNUSABLE, "-Infinity is not JSON"),
    ("key twice", file('{"schema": 1, "K": 3, "K": 4}', "zoo"), UNUSABLE, "key 'K' is given twice"),
    ("no schema", file("{}", "zoo"), UNUSABLE, "schema is None, only 1 is read"),
    ("later schema", file('{"schema": 2}', "zoo"), UNUSABLE, "schema is 2, only 1 is read"),
    ("schema true", file('{"schema": true}', "zoo"), UNUSABLE, "schema is True, only 1 is read"),
    ("unknown key", file('{"schema": 1, "T": 3}', "zoo"), UNUSABLE, "unknown key 'T'; a case has only: A_log, K"),
    ("text for a number", file('{"schema": 1, "K": "3"}', "zoo"), UNUSABLE, "K is '3', but it must be an integer"),
    ("too large a float", file('{"schema": 1, "scale": 1e999}', "zoo"), UNUSABLE, "scale is inf, but it must be"),
    ("no target", file('{"schema": 1}'), UNUSABLE, "holds a bare case and names no target; say which"),
    ("no such target", file('{"schema": 1}', "nope"), UNUSABLE, "target 'nope' is not known"),
    ("no script of it", file('{"schema": 1}', "zoo", "--snippet", "s.py"), UNUSABLE, "torch function, and zoo is none"),
    ("overflow", file('{"schema": 1, "dtype": "float16", "q_exponent": 60}', "zoo"), UNUSABLE, "float16 ends at 65504"),
    # finding files
    ("finding: schema", finding(schema=9), UNUSABLE, "schema is 9; this version reads 1"),
    ("finding: field", finding(x=1), UNUSABLE, "unknown field 'x'; the fields are case, check"),
    ("finding: target", finding(target=9), UNUSABLE, "target is 9; it must be a name in quotes"),
    ("finding: no such target", finding(target="nope"), UNUSABLE, "target 'nope' is not known"),
    ("finding: check", finding(check="flor"), UNUSABLE, "check is 'flor'; the checks are floor, "),
    ("finding: check list", finding(check=["floor"]), UNUSABLE, "check is ['floor']; the checks are floor, "),
    ("finding: case", finding(case=3), UNUSABLE, "a case is a JSON object, not a int"),
    # worst cases
    ("worst: fields", worst(more=1), ValueError, "it holds case, more, output, ratio, schema, target; the fields must"),
    ("worst: list", worst("[]"), ValueError, "w.json: it holds list; the fields must be"),
    ("worst: schema", worst(schema=2), ValueError, "schema 2 with ratio 2.0 is not a worst case of schema 1"),
    ("worst: ratio", worst(ratio="inf"), ValueError, "schema 1 with ratio 'inf' is not"),
    ("worst: output", worst(output="x"), ValueError, "target 'zoo' with output 'x' is not"),
    ("worst: target", worst(target=7), ValueError, "target 7 with output 'o' is not"),
    ("worst: case", worst(case={"schema": 1, "V": 0}), ValueError, "w.json: V is 0, but it must be"),
    ("worst: NaN", worst('{"ratio": NaN}'), ValueError, "w.json: NaN is not JSON"),
    ("worst: not UTF-8", worst(b"\xfe"), ValueError, "can't decode byte 0xfe"),
    # Case, its inputs and its strategies
    ("case: dtype", call(Case, dtype="float8"), ValueError, "dtype is 'float8', but it must be one of float16"),
    ("case: K", call(Case, K=257), ValueError, "K is 257, but it must be an integer in [1, 256]"),
    ("case: switch", call(Case, dht=1), ValueError, "dht is 1, but it is a switch"),
    ("case: lengths", call(Case, lengths=(3, 4)), ValueError, "lengths is (3, 4), but sequences of a batch have"),
    ("case: regime", call(Case, gate_regime="fast"), ValueError, "gate_regime is 'fast', but it must be one of"),
    ("case: keyword", call(Case, T=3), TypeError, "unexpected keyword argument 'T'"),
    ("inputs", call(make_call, Case(dtype="float16", v_exponent=64)), ValueError, "v reaches "),
    ("cases: knob", call(cases, T=3), ValueError, "'T' is no knob of a case; the knobs are "),
    ("cases: limit", call(cases, max_tokens=0), ValueError, "max_tokens is 0, but it must be at least 1"),
    # problems of the references
    ("problem: axes", problem(q=z(4, 3)), ValueError, "q and v have 2 and 4 axes; both need 4"),
    ("problem: k", problem(k=z(1, 4, 2, 9)), ValueError, "k has shape (1, 4, 2, 9); the other arguments ask for"),
    ("problem: heads", problem(v=z(1, 4, 3, 5)), ValueError, "v has 3 heads, which is no multiple of the 2"),
    ("problem: dtype", problem(beta=z(1, 4, 2, dtype=np.float32)), ValueError, "beta is float32; the references take"),
    ("problem: empty", problem(v=z(1, 4, 2, 0)), ValueError, "v (1, 4, 2, 0) has an empty axis"),
    ("problem: offsets", problem(cu_seqlens=np.array([0, 5])), ValueError, "cu_seqlens [0, 5] must start at 0"),
    ("problem: float offsets", problem(cu_seqlens=z(2)), ValueError, "cu_seqlens is float64 of shape (2,)"),
    ("problem: gate", problem(gate="sigmoid"), ValueError, "gate is 'sigmoid'; it must be 'none', 'log'"),
    ("problem: no g", problem(g=None), ValueError, "g is missing with gate 'log'"),
    ("problem: bound", problem(gate="bounded", lower_bound=-9.0), ValueError, "lower_bound is -9.0; the bounded gate"),
    ("problem: scale", problem(scale=np.inf), ValueError, "scale is inf; it must be finite"),
    ("problem: NaN in v", problem(v=nan(PROBLEM.v)), ValueError, "v holds a value that is not finite"),
    ("problem: NaN in g", problem(g=nan(PROBLEM.g)), ValueError, "g holds NaN or +inf"),
    # contracts, checks, profiles, dtypes, names
    ("contract: chunk", call(Contract, "c", 0, "float16"), ValueError, "chunk is 0; it must be at least 1"),
    ("contract: storage", call(storage16, "float8", 64), ValueError, "storage is 'float8'; use float16"),
    ("contract: wide", call(Contract, "c", 64, "float16", wide="float64"), ValueError, "wide is 'float64'; only"),
    ("contract: site", call(Contract, "c", 64, "float16", frozenset({"X"})), ValueError, "'X' is no site; use A, "),
    ("contract: inverse", call(Contract, "c", 64, "float16", inverse="lu"), ValueError, "inverse is 'lu'; use"),
    ("contract: name", call(contract_by_name, "f8", "float16", 64), verikda.targets.TargetError, "'f8' is not known"),
    ("checks", call(named, ("floor", "flor")), ValueError, "there is no check 'flor'; the checks are "),
    ("list, none", call(choose_listed, "--on", "dog", ("a", "b"), " , "), ValueError, "--on names no dog; give one or"),
    ("list", call(choose_listed, "--on", "dog", ("a", "b"), "a, c"), ValueError, "no dog 'c'; the dogs are a, b"),
    ("choose", call(choose, "mode", ("a", "b"), ["a", ""]), ValueError, "there is no mode ''; the modes are a, b"),
    ("dtypes", call(round_to, 1.0, "float64"), ValueError, "dtype is 'float64'; use one of float16, bfloat16"),
    ("bits of no number", call(to_hex, 0.1, "bfloat16"), ValueError, "0.1 is not a bfloat16 number"),
    ("judge", call(judge, {"o": z(1)}, {}, PROBLEM, storage16("float16", 64)), ValueError, "no dtype is given for o"),
    ("package", call(getattr, verikda, "chunk_kd"), AttributeError, "no attribute 'chunk_kd'; it has Case, "),
    # operators
    ("op: no array", op("chunk_kda", q=[1.0]), TypeError, "q is a list; pass a torch tensor, a NumPy array"),
    ("op: dtype", op("chunk_kda", q=PROBLEM.q), TypeError, "q is float64; use float16, bfloat16, float32"),
    ("op: axes", op("chunk_kda", q=z(4, 3, dtype=np.float32)), ValueError, "q has shape [4, 3]; expected [B,T,H,K]"),
    ("op: beta", op("chunk_kda", beta=z(1, 4, 3, dtype=np.float32)), ValueError, "beta has shape [1, 4, 3]"),
    ("op: chunk", op("chunk_kda", chunk_size=48), ValueError, "chunk_size is 48; use 16, 32 or 64"),
    ("op: scale", op("chunk_kda", scale=np.nan), ValueError, "scale is nan; use a finite number"),
    ("op: switch", op("chunk_kda", output_final_state=1), TypeError, "output_final_state is 1; use True or False"),
    ("op: pair", op("chunk_kda", allow_neg_eigval=True), ValueError, "allow_neg_eigval=True doubles the sigmoid"),
    ("op: offsets", op("chunk_kda", cu_seqlens=np.array([0, 9])), ValueError, "cu_seqlens ends at 9, but q has T=4"),
    ("op: keyword", op("chunk_kda", head_first=True), TypeError, "unexpected keyword argument 'head_first'"),
    ("op: gate given", op("chunk_delta_rule"), TypeError, "unexpected keyword argument 'g'"),
    ("op: recurrent", op("recurrent_kda", k=z(1, 4, 2, 9, dtype=np.float32)), ValueError, "k has shape [1, 4, 2, 9]"),
    # pytest
    ("pytest: target", pytest_with("--verikda-target=nope"), USAGE, "target 'nope' is not known"),
    ("pytest: profile", pytest_with("--verikda-target=zoo", "--verikda-profile=x"), USAGE, "there is no profile 'x'"),
    ("pytest: cases", pytest_with("--verikda-target=zoo", "--verikda-cases=0"), USAGE, "--verikda-cases is 0; give"),
    ("pytest: cases text", pytest_with("--verikda-cases=x"), USAGE, "--verikda-cases: invalid int value: 'x'"),
    ("pytest: seed", pytest_with("--verikda-seed=-1"), USAGE, "--verikda-seed is -1; give a number from 0"),
    ("pytest: empty target", pytest_with("--verikda-target="), USAGE, "--verikda-target is empty, so nothing would"),
    ("pytest: no target", pytest_with("--verikda-cases=6"), USAGE, "--verikda-cases is 6, but no target is named"),
]


@pytest.mark.parametrize(("attempt", "refused", "says"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_bad_input(attempt: Try, refused: type[Exception] | int, says: str, tmp_path: Path) -> None:
    if isinstance(refused, int):
        status, text = attempt(tmp_path)
        assert status == refused, text
    else:
        with pytest.raises(refused) as error:
            attempt(tmp_path)
        assert type(error.value) is refused
        text = str(error.value)
    assert says.replace("{d}", str(tmp_path)) in text
    assert "\n" not in text, "one line"
    assert "Traceback" not in text


def test_the_good_neighbours_are_accepted(tmp_path: Path) -> None:
    """What the rows above change is right without the change: they are refused for what they say."""
    check_problem(PROBLEM)
    worst()(tmp_path)
    (tmp_path / "replay").mkdir()
    (tmp_path / "replay/good.json").write_text(json.dumps({"schema": 1, "target": "zoo", "check": "floor",
                                                           "case": {"schema": 1, "lengths": [3]}}))  # fmt: skip
    result = CliRunner().invoke(main, ["replay", str(tmp_path / "replay/good.json")])
    assert result.exit_code == 0, result.output


def test_rows_have_names_of_their_own() -> None:
    assert len({row[0] for row in TABLE}) == len(TABLE) >= 60
