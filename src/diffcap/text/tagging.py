"""Tag many sentences with their parts of speech (UPOS tags, such as NOUN), on several processes, with a cache file."""

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from diffcap.records import update_text
from diffcap.text.stanza_tagger import TaggerModel, find_tagger, load_pipeline, tag_batch
from diffcap.utils.cores import available_cores, map_on_processes

CHUNK_SIZE = 1000  # sentences that are tagged and written together; a chunk takes less than a second
_SENTENCE_ENDS = frozenset((".", "!", "?", ";"))


def split_sentences(tokens: Sequence[str]) -> list[list[str]]:
    """Split a tokenised caption after each full stop, exclamation mark, question mark and semicolon."""
    sentences: list[list[str]] = [[]]
    for token in tokens:
        sentences[-1].append(token)
        if token in _SENTENCE_ENDS:
            sentences.append([])
    return [sentence for sentence in sentences if sentence]


class TagCache:
    """UPOS tags of sentences, in memory (`tags`) and in a file, `tags.jsonl`, to which one process at a time appends lines.

    The first line of the file has the name of the tagger and the hash of its weights (`{"tagger", "identity"}`). Every other line,
    `{"sentence", "tags"}`, has the words of a sentence and one tag per word, both joined with spaces. The tags of another
    tagger in the file are deleted.
    """

    def __init__(self, path: Path | None, model: TaggerModel) -> None:
        self.path = path
        self.tags: dict[str, list[str]] = {}
        if path is None:
            return
        rows = []
        for line in path.read_bytes().split(b"\n") if path.is_file() else []:
            with contextlib.suppress(ValueError):  # a damaged line is left out, such as that of a killed process
                rows.append(json.loads(line))
        if not rows or rows[0].get("identity") != model.identity:
            rows = [{"tagger": model.name, "identity": model.identity}]
        update_text(path, "".join(map(_json_line, rows)))
        self.tags = {row["sentence"]: row["tags"].split(" ") for row in rows[1:]}

    def add(self, tagged_sentences: Iterable[tuple[str, list[str]]]) -> None:
        """Store new tagged sentences; one write appends all of them to the file and flushes them to disk (fsync)."""
        lines = []
        for sentence, tags in tagged_sentences:
            if sentence not in self.tags:
                self.tags[sentence] = tags
                lines.append(_json_line({"sentence": sentence, "tags": " ".join(tags)}))
        if self.path is not None:
            with self.path.open("ab") as file:
                file.write("".join(lines).encode())
                file.flush()
                os.fsync(file.fileno())


def _json_line(row: dict[str, str]) -> str:
    return json.dumps(row, ensure_ascii=False) + "\n"


def tag_sentences(
    sentences: Iterable[str],
    tagger: str = "english",
    cache_file: str | Path | None = None,
    workers: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, list[str]]:
    """Tag tokenised sentences with a Stanza tagger. Returns sentence -> UPOS tags, one per word.

    Args:
        sentences: words joined with single spaces; duplicates are tagged once, empty sentences are skipped.
        tagger: "english", "blocks", "tiles" or a folder.
        cache_file: a `tags.jsonl` to read and extend, see `TagCache`.
        workers: number of processes; 0 means one per core, or one in total if there is a GPU. The tags do not depend on the number.
        progress: called with (tagged sentences, all sentences) after each chunk.
    """
    import torch

    # A tag can depend on the other sentences of its chunk (padding, rounding). So the chunks have all sentences, including cached ones.
    distinct_sentences = sorted(filter(None, set(sentences)), key=lambda sentence: (sentence.count(" "), sentence))
    model = find_tagger(tagger)
    tag_cache = TagCache(Path(cache_file) if cache_file is not None else None, model)
    num_sentences = len(distinct_sentences)
    chunks = [distinct_sentences[start : start + CHUNK_SIZE] for start in range(0, num_sentences, CHUNK_SIZE)]
    untagged_chunks = [chunk for chunk in chunks if any(sentence not in tag_cache.tags for sentence in chunk)]
    num_done = num_sentences - sum(map(len, untagged_chunks))
    progress(num_done, num_sentences)
    workers = workers or (1 if torch.cuda.is_available() else available_cores())
    if len(untagged_chunks) <= 3:  # starting processes takes as long as tagging thousands of sentences
        workers = 1
    arguments = [(model, chunk) for chunk in untagged_chunks]
    for chunk, tags in zip(untagged_chunks, map_on_processes(_tag_chunk, arguments, min(workers, len(arguments)))):
        tag_cache.add(zip(chunk, tags))
        num_done += len(chunk)
        progress(num_done, num_sentences)
    _pipelines.clear()  # frees their memory
    return {sentence: tag_cache.tags[sentence] for sentence in distinct_sentences}


# Identity of a tagger -> its pipeline. A worker loads the pipeline with its first chunk: the parent would not get an earlier error.
_pipelines: dict[str, Any] = {}


def _tag_chunk(model: TaggerModel, chunk: list[str]) -> list[list[str]]:
    if model.identity not in _pipelines:
        _pipelines[model.identity] = load_pipeline(model)
    return tag_batch(_pipelines[model.identity], chunk)
