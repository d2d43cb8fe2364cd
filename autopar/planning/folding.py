"""Folds many paths into few names: `params/encoder/**`, `params/layer_{0..11}/kernel`. No path is left out."""

from __future__ import annotations

import re
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence

#: Name -> the paths that it stands for.
Folded = Mapping[str, tuple[str, ...]]


def fold_paths(decided: Mapping[str, Hashable], lines: int, others: Collection[str] = ()) -> Folded:
    """Returns the finest folding that takes at most so many names, or the coarsest one.

    Args:
      decided: Path -> what is decided of it. Paths of different decisions are never folded into one name, and a name
        stands for all given paths that it matches.
      lines: How many names there should be at most.
      others: Paths that no name may match.
    """
    if len(decided) <= lines:
        return {path: (path,) for path in decided}
    foldings = [_fold_at(decided, depth, others) for depth in range(max(path.count("/") for path in decided) + 2)]
    return next((folded for folded in reversed(foldings) if len(folded) <= lines), foldings[0])


def _fold_at(decided: Mapping[str, Hashable], depth: int, others: Collection[str]) -> Folded:
    """Cuts paths after so many parts, or further down where what is below a part isn't decided alike."""
    below: dict[str, set[Hashable]] = {}
    for path, decision in [*dict.fromkeys(others).items(), *decided.items()]:
        for prefix in _prefixes(path):
            below.setdefault(prefix, set()).add(decision)
    cut: dict[str, list[str]] = {}
    for path in decided:
        prefixes = _prefixes(path)
        start = min(depth, len(prefixes) - 1)
        cut.setdefault(next(prefix for prefix in prefixes[start:] if len(below[prefix]) == 1), []).append(path)
    names = {_name(prefix, paths): paths for prefix, paths in cut.items()}
    folded: dict[str, tuple[str, ...]] = {}
    for decision in dict.fromkeys(decided.values()):
        among = [name for name, paths in names.items() if decided[paths[0]] == decision]
        folded |= {
            name: tuple(p for each in merged for p in names[each]) for name, merged in fold_numbers(among).items()
        }
    return folded


def _prefixes(path: str) -> Sequence[str]:
    """Lists what a path begins with, from nothing to itself."""
    parts = path.split("/")
    return ["/".join(parts[:k]) for k in range(len(parts) + 1)]


def _name(prefix: str, paths: Sequence[str]) -> str:
    if len(paths) == 1:
        return paths[0]
    return f"{prefix}/**" if prefix else "**"


def fold_numbers(names: Iterable[str]) -> Folded:
    """Writes names that differ in a number as one: `layer_{0..11}/kernel`; each set of numbers is said in full."""
    rows = {tuple(re.split(r"(\d+)", name)): (name,) for name in names}
    for place in range(1, max(map(len, rows), default=0), 2):
        groups: dict[tuple[str, ...], dict[str, tuple[str, ...]]] = {}
        for words, merged in rows.items():
            number = words[place] if place < len(words) else ""
            groups.setdefault((*words[:place], "", *words[place + 1 :]), {})[number] = merged
        rows = {
            (*words[:place], _numbers(list(group)), *words[place + 1 :]): tuple(n for m in group.values() for n in m)
            for words, group in groups.items()
        }
    return {"".join(words): merged for words, merged in rows.items()}


def _numbers(numbers: Sequence[str]) -> str:
    """Writes numbers as a shell would: 3, {0,2}, {0..11}, {0..3,5}."""
    if len(numbers) == 1:
        return numbers[0]
    runs: list[list[str]] = []
    for number in sorted(numbers, key=lambda number: (int(number), number)):
        if runs and int(number) == int(runs[-1][-1]) + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return "{" + ",".join(f"{run[0]}..{run[-1]}" if len(run) > 2 else ",".join(run) for run in runs) + "}"
