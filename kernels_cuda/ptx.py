"""Which instructions a kernel's PTX holds."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable


def opcodes(ptx: str, symbol: str) -> dict[str, int]:
    """How often each instruction stands in one kernel.

    Parameters
    ----------
    ptx : text of a compiled file.
    symbol : mangled name of the kernel.

    Returns
    -------
    counts by opcode, sorted; also of ".local" arrays, and of global accesses at a "cut offset": an address made of a
    64-bit number that was cut to 32 bits.
    """
    ptx = ptx[ptx.index(f".entry {symbol}(") :].split(".entry ", 2)[1]
    found = Counter(re.findall(r"^\s*(?:@!?%p\d+\s+)?([a-z][a-z0-9_]*(?:[.:]+[a-z0-9_]+)*)\s", ptx, re.MULTILINE))
    found[".local"] = len(re.findall(r"^\s*\.local\b", ptx, re.MULTILINE))
    found["cut offset"] = _cut_offsets(ptx)
    return {name: found[name] for name in sorted(found) if found[name]}


def _cut_offsets(ptx: str) -> int:
    """Accesses of global memory whose address is made of a 64-bit number that was cut to 32 bits.

    A number counts as one of 64 bits if something of that width was loaded or multiplied for it. A value is made of
    what its registers were given further up. Not counted: the short way of a 64-bit division, which the compiler takes
    where both numbers fit; the low half of one product of 32-bit numbers, which is that product in 32 bits.
    """
    given: defaultdict[str, set[int]] = defaultdict(set)  # register: instructions that wrote it so far
    made_of: dict[int, set[int]] = {}
    cut: dict[int, set[int]] = {}
    wide: set[int] = set()
    products: set[int] = set()
    divided: set[int] = set()
    addresses: list[set[int]] = []
    lines = re.findall(r"^\s*(?:@!?%p\d+\s+)?([a-z][a-z0-9_.:]*)\s+([^;]*);", ptx, re.MULTILINE)
    for at, (opcode, operands) in enumerate(lines):
        if re.match(r"(ld|st)\.(volatile\.)?global|cp\.async.*\.global$", opcode):
            addresses += [set(given[x]) for x in re.findall(r"\[(%rd\d+)", operands)[-1:]]
        if opcode.startswith(("st.", "setp.", "cp.async", "bra")):
            continue
        load = opcode.startswith("ld.")
        written, _, read = operands.partition("[" if load else "}" if operands.startswith("{") else ",")
        sources = set[int]().union(*(given[x] for x in re.findall(r"%rd?\d+", read)))
        if re.match(r"ld\..*64$|mul\.wide|(mul|mad)\.lo\.[us]64", opcode):
            wide.add(at)
        if opcode.startswith("mul.wide"):
            products.add(at)
        if re.match(r"(div|rem)\.[us]32", opcode):
            divided |= sources
        if re.match(r"cvt\.[us]32\.[us]64", opcode) and not sources <= products:
            cut[at] = sources
        else:
            made_of[at] = set() if load else sources
        for register in re.findall(r"%rd?\d+", written):
            given[register].add(at)

    def reaches(start: Iterable[int], marks: Collection[int]) -> bool:
        waiting, seen = [*start], set[int]()
        while waiting:
            at = waiting.pop()
            if at in marks:
                return True
            if at not in seen:
                seen.add(at)
                waiting += made_of.get(at, ())
        return False

    harmful = {at for at, sources in cut.items() if at not in divided and reaches(sources, wide)}
    return sum(reaches(address, harmful) for address in addresses) if harmful else 0
