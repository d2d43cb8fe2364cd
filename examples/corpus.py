"""Words to train on, found on the machine itself: nothing is downloaded.

Every Python installation carries some ten million words of text: the source of the standard library, and of the
packages beside it. Their identifiers and words are skewed as natural language is (a few words are most of the text,
most words are rare), which is what makes an embedding table's gradient sparse.

Invariants: the same files give the same ids (paths are sorted, ties between words go to the one seen first); ids are
in falling order of frequency, which `log_uniform` relies on; id 0 is `<unk>`; held-out text comes from files that
the training text and the vocabulary don't see (of fewer than 50 files: from the end of the text).
"""

from __future__ import annotations

import os
import re
import sysconfig
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

UNKNOWN = "<unk>"
MIN_COUNT = 2  # a word seen once teaches nothing about itself; as <unk>, it teaches the model what <unk> looks like
MAX_TOKENS = 12_000_000  # reading stops here, so that a large environment doesn't make the demo slow
HELD_OUT_EVERY = 50  # files: 2% of them
HELD_OUT_SHARE = 0.05  # of the text, where there are too few files to hold some out
WORD = re.compile(r"[^\W\d]\w*")
NOT_OURS = {"site-packages", "dist-packages", "__pycache__"}

Batch = dict[str, np.ndarray]


class CorpusError(ValueError):
    """The corpus can't be trained on; the message says why and what to do."""


@dataclass(frozen=True)
class Corpus:
    """A text as word ids, and what was counted while it was read."""

    words: list[str]  # by id, most frequent first; words[0] is <unk>
    train: np.ndarray  # [tokens] int32
    held_out: np.ndarray  # [tokens] int32
    files: int
    distinct_words: int  # before the vocabulary was cut

    @property
    def tokens(self) -> int:
        return len(self.train) + len(self.held_out)


def python_sources() -> list[Path]:
    """The standard library's files and those of the environment's packages, in an order that doesn't change."""
    paths = sysconfig.get_paths()
    roots = dict.fromkeys(Path(paths[name]) for name in ("stdlib", "purelib", "platlib"))
    return [file for root in roots for file in _files_under(root, suffix=".py")]


def text_files(path: Path) -> list[Path]:
    """The user's own corpus: one file, or every file of a folder."""
    if path.is_file():
        return [path]
    if path.is_dir():
        return list(_files_under(path))
    raise CorpusError(f"there is no file or folder {str(path)!r}; --corpus takes a text file or a folder of them")


def _files_under(root: Path, suffix: str = "") -> Iterator[Path]:
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(name for name in subfolders if name not in NOT_OURS and not name.startswith("."))
        yield from (Path(folder, name) for name in sorted(names) if name.endswith(suffix))


def load_corpus(path: Path | None = None, vocab: int | None = None) -> Corpus:
    """Reads `path` (by default this machine's Python source) and gives every word an id.

    `vocab` is the number of ids, `<unk>` included; by default every word that the training text holds at least
    `MIN_COUNT` times has one.

    Raises:
        CorpusError: the path doesn't exist or holds no words, or the vocabulary would have fewer than two ids.
    """
    if vocab is not None and vocab < 2:
        raise CorpusError(f"--vocab {vocab} leaves no word beside {UNKNOWN}; it takes 2 or more")
    texts, words = _read(text_files(path) if path else python_sources())
    if not words:
        raise CorpusError(f"no words were found in {str(path or sysconfig.get_paths()['stdlib'])!r}")
    train, held_out = _split(texts)
    new_ids, kept = _rank(np.bincount(train, minlength=len(words)), vocab)
    return Corpus(
        words=[UNKNOWN, *(words[i] for i in kept)],
        train=new_ids[train],
        held_out=new_ids[held_out],
        files=len(texts),
        distinct_words=len(words),
    )


def _read(files: Iterable[Path]) -> tuple[list[np.ndarray], list[str]]:
    """Each file's words as ids in order of first appearance. Files that can't be read, and binaries, are skipped."""
    ids: defaultdict[str, int] = defaultdict()
    ids.default_factory = ids.__len__
    texts: list[np.ndarray] = []
    total = 0
    for file in files:
        try:
            data = file.read_bytes() if file.is_file() else b""  # a pipe would wait for ever
        except OSError:
            continue
        if b"\0" in data:
            continue
        found = WORD.findall(data.decode("utf-8", errors="ignore"))
        texts.append(np.fromiter(map(ids.__getitem__, found), np.int32, len(found)))
        total += len(found)
        if total >= MAX_TOKENS:
            break
    return texts, list(ids)


def _split(texts: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Training and held-out text: whole files are held out, since a file's words repeat within it."""
    if len(texts) >= HELD_OUT_EVERY:
        held_out = texts[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
        train = [text for i, text in enumerate(texts, 1) if i % HELD_OUT_EVERY]
        return np.concatenate(train), np.concatenate(held_out)
    text = np.concatenate(texts)
    cut = len(text) - round(len(text) * HELD_OUT_SHARE)
    return text[:cut], text[cut:]


def _rank(counts: np.ndarray, vocab: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Old id -> new id, by falling frequency and with 0 for what isn't kept; and the kept old ids in that order."""
    order = np.argsort(-counts, kind="stable")
    known = int(np.count_nonzero(counts >= MIN_COUNT))
    # A multiple of 8 ids by default: plain JAX shards the rows only where the devices divide them, to be compared with.
    all_known = known - (known + 1) % 8 if known > 8 else known
    kept = order[: all_known if vocab is None else min(vocab - 1, known)]
    if not len(kept):
        raise CorpusError(f"the corpus is too small: no word occurs {MIN_COUNT} times in it")
    new_ids = np.zeros(len(counts), np.int32)
    new_ids[kept] = np.arange(1, len(kept) + 1)
    return new_ids, kept


def batches(corpus: Corpus, *, batch: int, length: int, negatives: int, seed: int) -> Iterator[Batch]:
    """Endless batches: `batch` windows of `length` words at random places, and shared negatives for the softmax.

    `inputs` and `targets` are [batch, length] int32, `negatives` [negatives] int32. The same seed gives the same
    batches.

    Raises:
        CorpusError: the training text is shorter than one window.
    """
    rng = np.random.default_rng(seed)
    last = _last_start(corpus.train, length, "training")  # here, not at the first batch: a generator raises late

    def endless() -> Iterator[Batch]:
        while True:
            window = windows(corpus.train, rng.integers(0, last, batch, endpoint=True), length)
            yield {**window, "negatives": log_uniform(rng, len(corpus.words), negatives)}

    return endless()


def held_out_windows(corpus: Corpus, *, tokens: int, length: int) -> Batch:
    """About `tokens` held-out words, in windows spread evenly over the text: the same ones each time."""
    last = _last_start(corpus.held_out, length, "held-out")
    count = max(1, min(tokens // length, last // length + 1))
    return windows(corpus.held_out, np.linspace(0, last, count).astype(np.int64), length)


def windows(text: np.ndarray, starts: np.ndarray, length: int) -> Batch:
    """The words from each start on, and for each word the one that follows it."""
    places = starts[:, None] + np.arange(length)
    return {"inputs": text[places], "targets": text[places + 1]}


def _last_start(text: np.ndarray, length: int, name: str) -> int:
    if len(text) <= length:
        raise CorpusError(
            f"the {name} text has {len(text)} words, and --length {length} takes {length + 1} or more: "
            "give a larger corpus or a smaller --length"
        )
    return len(text) - length - 1


def log_uniform(rng: np.random.Generator, vocab: int, count: int) -> np.ndarray:
    """Ids with P(id) = log((id + 2) / (id + 1)) / log(vocab + 1): Zipf's law over ids in order of frequency."""
    ids = np.exp(rng.random(count) * np.log(vocab + 1)).astype(np.int32) - 1
    return np.minimum(ids, vocab - 1)  # rounding can reach vocab


def unigram_perplexity(corpus: Corpus, targets: np.ndarray) -> float:
    """What one would reach by knowing each word's frequency and nothing of its context: a bar for the model."""
    counts = np.bincount(corpus.train, minlength=len(corpus.words)) + 1.0
    return float(np.exp(-np.log(counts / counts.sum())[targets].mean()))
