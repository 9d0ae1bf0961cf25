"""Part-of-speech tags of many sentences: each once, in batches, on several processes, remembered in a file."""

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from diffcap.text.stanza_tagger import TaggerModel, find_tagger, load_pipeline, tag_batch
from diffcap.text.tag_cache import TagCache

CHUNK = 1000  # sentences tagged and written together: under a second, so a kill loses little
_ENDS = frozenset((".", "!", "?", ";"))


def split_sentences(tokens: Sequence[str]) -> list[list[str]]:
    """Cut a tokenised caption after each full stop, exclamation mark, question mark and semicolon."""
    sentences: list[list[str]] = []
    start = 0
    for place, token in enumerate(tokens, 1):
        if token in _ENDS or place == len(tokens):
            sentences.append(list(tokens[start:place]))
            start = place
    return sentences


def tag_sentences(
    sentences: Iterable[str],
    tagger: str = "english",
    cache: str | Path | None = None,
    workers: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, list[str]]:
    """Tag tokenised sentences with a Stanza tagger; the same tags for any number of workers, killed runs or not.

    Args:
        sentences: words joined with single blanks; repeated ones are tagged once, empty ones left out.
        tagger: as `find_tagger` takes it.
        cache: a `tags.jsonl` to read and add to; None to keep nothing.
        workers: processes; 0 for one a core.
        progress: called with (sentences tagged, sentences in all) after each chunk.

    Returns:
        Sentence -> UPOS tags, one a word.

    Raises:
        DiffcapError: the tagger is not there or broken.
    """
    # A tag can depend on the sentences in its batch (padding, last bits), so the chunks are cut from all sentences of
    # this call, whatever of them is known already: a resumed run tags the very same batches.
    wanted = sorted({sentence for sentence in sentences if sentence}, key=lambda each: (each.count(" "), each))
    model = find_tagger(tagger)
    known = TagCache(Path(cache) if cache is not None else None, model)
    chunks = [wanted[start : start + CHUNK] for start in range(0, len(wanted), CHUNK)]
    todo = [chunk for chunk in chunks if any(sentence not in known.tags for sentence in chunk)]
    done = len(wanted) - sum(map(len, todo))
    if progress:
        progress(done, len(wanted))
    for chunk, tags in zip(todo, _tag_chunks(model, todo, workers or os.cpu_count() or 1)):
        known.add([(sentence, found) for sentence, found in zip(chunk, tags) if sentence not in known.tags])
        done += len(chunk)
        if progress:
            progress(done, len(wanted))
    return {sentence: known.tags[sentence] for sentence in wanted}


def _tag_chunks(model: TaggerModel, chunks: list[list[str]], workers: int) -> Iterator[list[list[str]]]:
    if min(workers, len(chunks)) <= 1 or len(chunks) <= 3:  # starting processes costs as much as tagging some thousands
        if chunks:
            yield from _tag_here(model, chunks)
        return
    context = multiprocessing.get_context("spawn")  # torch does not survive a fork of a threaded process
    with ProcessPoolExecutor(min(workers, len(chunks)), context, _start_worker) as pool:
        yield from pool.map(_tag_in_worker, [model] * len(chunks), chunks)


def _tag_here(model: TaggerModel, chunks: list[list[str]]) -> Iterator[list[list[str]]]:
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the workers: the same sums, the same tags
    try:
        pipeline = load_pipeline(model)
        for chunk in chunks:
            yield tag_batch(pipeline, chunk)
    finally:
        torch.set_num_threads(threads)


def _start_worker() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:  # a worker whose parent was killed would wait for work for ever
        threading.Thread(target=_follow, args=(parent,), daemon=True).start()
    import torch

    torch.set_num_threads(1)


def _follow(parent: Any) -> None:
    parent.join()
    os._exit(1)


_pipelines: dict[
    str, Any
] = {}  # of this worker, loaded with its first chunk: an error then reaches the parent as it is


def _tag_in_worker(model: TaggerModel, chunk: list[str]) -> list[list[str]]:
    if model.identity not in _pipelines:
        _pipelines[model.identity] = load_pipeline(model)
    return tag_batch(_pipelines[model.identity], chunk)
