"""The page: two upload zones, examples, a choice of captioner, and the answer."""

import os
import sys
import threading
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gradio as gr
from PIL import Image, UnidentifiedImageError

from diffcap.pair_captioner import SHIPPED_CAPTIONERS
from diffcap.report.page import resource
from diffcap.utils.errors import DiffcapError
from diffcap.utils.image_io import read_image, read_pair
from diffcap.web.captioners import Captioners
from diffcap.web.result import data_uri, message, render_examples, result

MAX_BEAMS = 10
_BEAMS = 5
_MAX_CONCURRENT, _MAX_QUEUE = 2, 200  # captions computed at a time, waiting requests
_UPLOAD_SECONDS = 1800  # seconds that an uploaded file is kept
_BROWSER_FORMATS = {"PNG", "JPEG", "GIF", "WEBP", "BMP", "AVIF", "ICO"}

# Decoding the largest images takes hundreds of megabytes, so only one is decoded at a time.
_decoding = threading.Lock()


def build_page(captioners: Captioners, folder: Path) -> gr.Blocks:
    """Build the page; `folder` is for uploaded files only."""
    os.environ.update(GRADIO_TEMP_DIR=str(folder), GRADIO_ANALYTICS_ENABLED="False", HF_HUB_DISABLE_TELEMETRY="1")
    examples = render_examples()

    def choose(current: object, event: gr.EventData) -> tuple[Any, ...]:  # gradio reads this type from the signature
        """The images of an example, no messages, and its captioner if one that ships was chosen."""
        try:
            example = examples[int(event.index) % len(examples)]
        except (AttributeError, OverflowError, TypeError, ValueError):
            raise gr.Error("There is no such example.", print_exception=False) from None
        sources = [choice.source for choice in captioners.choices]
        places = {source: str(number) for number, source in enumerate(sources) if source in SHIPPED_CAPTIONERS}
        place = places.get(example.captioner) if current in places.values() else None
        return example.before, example.after, "", "", place or gr.skip()

    with gr.Blocks(
        title="diffcap: what changed?",
        analytics_enabled=False,
        delete_cache=(_UPLOAD_SECONDS // 3, _UPLOAD_SECONDS),
        fill_width=False,
    ) as page:
        gr.HTML(
            '<header class="dc-header"><h1>What changed?</h1><p>Two pictures of the same thing, before and after: '
            "the captioner describes the change in a sentence and shows the attention map of each word.</p></header>",
            js_on_load=None,
            apply_default_css=False,
        )
        with gr.Row(equal_height=False, elem_classes="dc-zones"):
            zones = [_upload_zone(side) for side in ("before", "after")]
        (before, message_before), (after, message_after) = zones
        cards = "".join(
            f'<button type="button" class="dc-example" data-index="{number}"><img alt="" src="{data_uri(example.before, "JPEG")}">'
            f'<img alt="" src="{data_uri(example.after, "JPEG")}"><span>{example.title}</span></button>'
            for number, example in enumerate(examples)
        )
        example_buttons = gr.HTML(
            f'<div class="dc-examples" role="group" aria-label="Examples"><b>Or try one of these</b><div>{cards}</div></div>',
            js_on_load=resource("examples.js", "diffcap.web"),
            apply_default_css=False,
            elem_id="examples",
            padding=False,
        )
        with gr.Row(elem_classes="dc-controls"):
            captioner = gr.Dropdown(
                [(choice.label, str(number)) for number, choice in enumerate(captioners.choices)],
                value="0",
                label="Captioner",
                filterable=False,
                scale=4,
                min_width=260,
                elem_id="captioner",
            )
            beams = gr.Slider(
                1, MAX_BEAMS, _BEAMS, step=1, label="Beams", info="width of the search", scale=2, min_width=180
            )
            button = gr.Button("What changed?", variant="primary", scale=2, min_width=180, elem_id="ask")
        answer = gr.HTML(
            "",
            js_on_load=resource("result.js", "diffcap.web"),
            apply_default_css=False,
            elem_id="answer",
            padding=False,
        )

        inputs = [before, after, captioner, beams]
        for component in inputs:  # gradio would fetch any address, and any file of the server, that a request names
            setattr(component, "async_move_resource_to_block_cache", partial(_uploaded_only, component, folder))  # noqa: B010
        caption: dict[str, Any] = {
            "fn": _hide_traceback(partial(_answer, captioners)),
            "inputs": inputs,
            "outputs": answer,
            "api_visibility": "undocumented",
        }
        uploads = []
        for side, zone, notes in (("before", before, message_before), ("after", after, message_after)):
            check = _hide_traceback(partial(_check_upload, side))
            uploads.append(
                zone.upload(check, zone, [zone, notes], api_name=f"look_{side}", api_visibility="undocumented")
            )
            zone.clear(lambda: "", None, notes, queue=False, api_visibility="private")
        button.click(**caption, api_name="caption")
        example_buttons.choose(
            choose, captioner, [before, after, message_before, message_after, captioner], api_visibility="private"
        ).then(**(caption | {"api_visibility": "private"}))
        after_upload = _hide_traceback(partial(_answer, captioners, is_upload=True))
        for upload in uploads:
            upload.then(**(caption | {"fn": after_upload, "api_visibility": "private"}))
    setattr(page, "preprocess_data", partial(_preprocess, page.preprocess_data))  # noqa: B010
    page.queue(default_concurrency_limit=_MAX_CONCURRENT, max_size=_MAX_QUEUE, api_open=False)
    return page


def _upload_zone(side: str) -> tuple[gr.Image, gr.HTML]:
    with gr.Column(min_width=150):
        zone = gr.Image(
            label=side.capitalize(),
            type="filepath",
            format="png",
            sources=["upload", "clipboard"],
            buttons=["fullscreen"],
            height=280,
            placeholder=f"# The picture {side}\nDrop it here, paste it, or press to choose a file",
            elem_id=f"zone-{side}",
        )
        # Images are read by `read_image`, not by gradio. Set on the component, since for a subclass gradio would write a file
        # into this folder.
        zone.preprocess = lambda payload: None if payload is None else payload.path  # type: ignore[method-assign]
        return zone, gr.HTML("", js_on_load=None, apply_default_css=False, padding=False, elem_id=f"message-{side}")


def _check_upload(side: str, path: str | None) -> tuple[Any, str]:
    """Check an uploaded file: a message if it cannot be read; a PNG of it if browsers cannot show its format."""
    if path is None:
        return None, ""
    try:
        with _decoding:
            picture = read_image(path, _name(side, path))
        with Image.open(path) as file:
            kind = file.format
    except DiffcapError as error:
        return None, message(_capitalized(error))
    except (Image.DecompressionBombError, UnidentifiedImageError):
        kind = None  # hundreds of megapixels, which were shrunk, or a TIFF that Pillow cannot decode
    notes = "".join(message(f"{_capitalized(note)}.", "note") for note in picture.notes)
    return (gr.skip() if kind in _BROWSER_FORMATS else picture.image), notes


def _answer(
    captioners: Captioners, before: str | None, after: str | None, choice: object, beams: float, is_upload: bool = False
) -> str:
    """The answer as HTML; after an upload, nothing until both images are there."""
    if is_upload and (before is None or after is None):
        return ""
    if not isinstance(choice, str) or not 1 <= beams <= MAX_BEAMS:  # gradio lets None, lists and NaN through
        raise gr.Error(f"Choose a captioner, and 1 to {MAX_BEAMS} beams.", print_exception=False)
    if before is None or after is None:
        lacking = "both pictures" if before is after else f"the picture {'before' if before is None else 'after'}"
        return message(f"Give {lacking} first: drop it above, or try an example.")
    try:
        with _decoding:
            pair = read_pair(before, after, (_name("before", before), _name("after", after)))
    except DiffcapError as error:
        return message(_capitalized(error))
    first = pair.before.image
    second = pair.after.image
    try:
        number = int(choice)
        with captioners.use(number) as captioner:
            caption = captioner(first, second, int(beams))
            notes = [_capitalized(captioner.domain_note)] if captioner.domain_note else []
            try:
                attention = captioner.attention(first, second, caption)
            except DiffcapError as error:  # the method has no attention maps
                attention = None
                notes.append(str(error))
    except DiffcapError as error:
        return message(str(error))
    notes += [f"{_capitalized(note)}." for note in pair.notes]
    return result([first, second], caption, attention, captioners.choices[number].label, notes)


def _name(side: str, path: str) -> str:
    """An image in messages, with the visitor's file name."""
    return f"the picture {side} ({Path(path).name})"


def _capitalized(sentence: object) -> str:
    text = str(sentence)
    return text[:1].upper() + text[1:]


def _hide_traceback(function: Callable[..., Any]) -> Callable[..., Any]:
    """For an unexpected exception, show visitors a sentence and write the traceback to the server's log."""

    def guarded(*values: Any) -> Any:
        try:
            return function(*values)
        except gr.Error:
            raise
        except Exception as error:
            if "out of memory" in str(error).lower() or isinstance(error, MemoryError):
                raise gr.Error("No memory left for this one; try again later.", print_exception=False) from None
            traceback.print_exc(file=sys.stderr)
            raise gr.Error(
                "Something went wrong on the server, which is no fault of your pictures; its log says what.",
                print_exception=False,
            ) from None

    return guarded


async def _preprocess(preprocess: Callable[..., Any], *values: Any) -> Any:
    """Replaces `Blocks.preprocess_data`: values that the page does not send are an error without a traceback in the log."""
    try:
        return await preprocess(*values)
    except Exception as error:
        text = error.message if isinstance(error, gr.Error) else "The request does not fit the page; reload the page."
        raise gr.Error(text, print_exception=False) from None


async def _uploaded_only(component: gr.components.Component, folder: Path, path: str | Path | None) -> str | None:
    """Accept only files that were uploaded here; replaces `Block.async_move_resource_to_block_cache`."""
    if path is None:
        return None
    real = Path(path).resolve()
    if not real.is_relative_to(folder.resolve()) or not real.is_file():
        raise gr.Error("This file was not uploaded here, or is no longer kept; upload it again.", print_exception=False)
    component.temp_files.add(str(real))
    return str(real)
