"""The web page: two upload zones, examples, a choice of captioner, and the answer."""

import os
import threading
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gradio as gr
from PIL import Image, UnidentifiedImageError

from diffcap.change import change_probability, scored_sentences
from diffcap.pair_captioner import SHIPPED_CAPTIONERS
from diffcap.report.page import read_resource
from diffcap.utils.errors import DiffcapError
from diffcap.utils.image_io import read_image, read_pair
from diffcap.web.captioners import Captioners
from diffcap.web.result import data_uri, render_examples, render_message, render_result

MAX_BEAMS = 10
_DEFAULT_BEAMS = 5  # initial value of the slider
_MAX_CONCURRENT, _MAX_QUEUE = 2, 200  # number of captions computed at a time, and of waiting requests
_UPLOAD_SECONDS = 1800  # how long an uploaded file is kept
_BROWSER_FORMATS = {"PNG", "JPEG", "GIF", "WEBP", "BMP", "AVIF", "ICO"}  # Pillow's names of what browsers can show
_FAULT = "Something went wrong on the server; your pictures are not the cause. The server's log has the error."

# Decoding the largest images takes hundreds of megabytes, so only one image is decoded at a time.
_decoding_lock = threading.Lock()


def build_page(captioners: Captioners, upload_folder: Path) -> gr.Blocks:
    """Build the page; `upload_folder` is for uploaded files only."""
    os.environ["GRADIO_TEMP_DIR"] = str(upload_folder)
    os.environ.update(GRADIO_ANALYTICS_ENABLED="False", HF_HUB_DISABLE_TELEMETRY="1")
    examples = render_examples()

    def show_example(old_choice: object, event: gr.EventData) -> tuple[Any, ...]:  # gradio needs the type of `event`
        """Return an example's images, two empty messages and, if the chosen captioner ships with diffcap, the example's captioner."""
        try:
            example = examples[int(event.index) % len(examples)]
        except (AttributeError, OverflowError, TypeError, ValueError):
            raise gr.Error("There is no such example.", print_exception=False) from None
        checkpoints = [choice.checkpoint for choice in captioners.choices]
        shipped = {name: str(index) for index, name in enumerate(checkpoints) if name in SHIPPED_CAPTIONERS}
        example_choice = shipped.get(example.captioner) if old_choice in shipped.values() else None
        return example.before, example.after, "", "", example_choice or gr.skip()

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
            zones = {side: _upload_zone(side) for side in ("before", "after")}
        (before, before_message), (after, after_message) = zones.values()
        cards = "".join(
            f'<button type="button" class="dc-example" data-index="{index}"><img alt="" src="{data_uri(example.before, "JPEG")}">'
            f'<img alt="" src="{data_uri(example.after, "JPEG")}"><span>{example.title}</span></button>'
            for index, example in enumerate(examples)
        )
        example_buttons = gr.HTML(
            f'<div class="dc-examples" role="group" aria-label="Examples"><b>Or try one of these</b><div>{cards}</div></div>',
            js_on_load=read_resource("examples.js", "diffcap.web"),
            apply_default_css=False,
            elem_id="examples",
            padding=False,
        )
        with gr.Row(elem_classes="dc-controls"):
            labels = [(choice.label, str(index)) for index, choice in enumerate(captioners.choices)]
            captioner = gr.Dropdown(
                labels, value="0", label="Captioner", filterable=False, scale=4, min_width=260, elem_id="captioner"
            )
            beams = gr.Slider(
                1, MAX_BEAMS, _DEFAULT_BEAMS, step=1, label="Beams", info="width of the search", scale=2, min_width=180
            )
            button = gr.Button("What changed?", variant="primary", scale=2, min_width=180, elem_id="ask")
        script = read_resource("result.js", "diffcap.web")
        answer = gr.HTML("", js_on_load=script, apply_default_css=False, elem_id="answer", padding=False)

        inputs = [before, after, captioner, beams]
        for component in inputs:  # without this, gradio reads any URL and any file of the server that a request names
            setattr(component, "async_move_resource_to_block_cache", partial(_accept_upload, component, upload_folder))  # noqa: B010
        answer_event: dict[str, Any] = {
            "fn": _hide_traceback(partial(_answer, captioners)),
            "inputs": inputs,
            "outputs": answer,
            "api_visibility": "undocumented",
        }
        uploads = []
        for side, (zone, message) in zones.items():
            check = _hide_traceback(partial(_check_upload, side))
            upload = zone.upload(check, zone, [zone, message], api_name=f"look_{side}", api_visibility="undocumented")
            uploads.append(upload)
            zone.clear(lambda: "", None, message, queue=False, api_visibility="private")
        button.click(**answer_event, api_name="answer")

        def caption(before: str, after: str, captioner: str = "0", beams: float = _DEFAULT_BEAMS) -> Any:
            """Caption two uploaded images; the result is that of `diffcap caption --json`."""
            return _hide_traceback(_caption)(captioners, before, after, captioner, beams)

        gr.Button(visible=False).click(caption, inputs, gr.JSON(visible=False), api_name="caption")
        example_buttons.choose(
            show_example, captioner, [before, after, before_message, after_message, captioner], api_visibility="private"
        ).then(**(answer_event | {"api_visibility": "private"}))
        answer_upload = _hide_traceback(partial(_answer, captioners, is_upload=True))
        for upload in uploads:
            upload.then(**(answer_event | {"fn": answer_upload, "api_visibility": "private"}))
    setattr(page, "preprocess_data", partial(_preprocess_data, page.preprocess_data))  # noqa: B010
    page.queue(default_concurrency_limit=_MAX_CONCURRENT, max_size=_MAX_QUEUE, api_open=False)
    return page


def _upload_zone(side: str) -> tuple[gr.Image, gr.HTML]:
    """Add a zone to upload an image, with a place for messages below it."""
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
        # gradio only passes the path; `read_image` reads the image. (If this were a subclass, gradio would write a .pyi file for it.)
        zone.preprocess = lambda payload: None if payload is None else payload.path  # type: ignore[method-assign]
        return zone, gr.HTML("", js_on_load=None, apply_default_css=False, padding=False, elem_id=f"message-{side}")


def _check_upload(side: str, path: str | None) -> tuple[Any, str]:
    """Return the zone's image (None if it cannot be read) and messages. If browsers cannot show the file, return the decoded image."""
    if path is None:
        return None, ""
    try:
        with _decoding_lock:
            picture = read_image(path, _picture_name(side, path))
        with Image.open(path) as file:
            image_format = file.format
    except DiffcapError as error:
        return None, render_message(_capitalize(error))
    except (Image.DecompressionBombError, UnidentifiedImageError):
        image_format = None  # `read_image` reads images that Pillow refuses, such as unusual TIFFs
    notes = "".join(render_message(f"{_capitalize(note)}.", "note") for note in picture.notes)
    return (gr.skip() if image_format in _BROWSER_FORMATS else picture.image), notes


def _answer(
    captioners: Captioners, before: str | None, after: str | None, choice: object, beams: float, is_upload: bool = False
) -> str:
    """Return the answer as HTML. After an upload, it is "" until both images are there."""
    if is_upload and (before is None or after is None):
        return ""
    if not isinstance(choice, str) or not 1 <= beams <= MAX_BEAMS:  # gradio lets None, lists and NaN through
        raise gr.Error(f"Choose a captioner, and 1 to {MAX_BEAMS} beams.", print_exception=False)
    if before is None or after is None:
        lacking = "both pictures" if before is after else f"the picture {'before' if before is None else 'after'}"
        return render_message(f"Give {lacking} first: drop it above, or try an example.")
    try:
        with _decoding_lock:
            pair = read_pair(before, after, (_picture_name("before", before), _picture_name("after", after)))
    except DiffcapError as error:
        return render_message(_capitalize(error))
    images = pair.before.image, pair.after.image
    try:
        index = int(choice)
        with captioners.use(index) as captioner:  # locks the captioner, and loads it if necessary
            caption = _locate(captioner, images, beams)
            # A captioner that was trained on rendered images only, or not trained, has a note about its reliability.
            notes = [_capitalize(captioner.domain_note)] if captioner.domain_note else []
            try:
                attention = captioner.attention(*images, caption)
            except DiffcapError as error:  # the method has no attention maps
                attention = None
                notes.append(str(error))
    except DiffcapError as error:
        return render_message(str(error))
    notes += [f"{_capitalize(note)}." for note in pair.notes]
    return render_result(images, caption, attention, captioners.choices[index].label, notes)


def _caption(
    captioners: Captioners, before: str | None, after: str | None, choice: object, beams: float
) -> dict[str, Any]:
    """Return the caption as JSON values."""
    if not (before and after and isinstance(choice, str) and 1 <= beams <= MAX_BEAMS):
        raise DiffcapError(f"give both pictures, a captioner as a number in text, and 1 to {MAX_BEAMS} beams.")
    with _decoding_lock:
        pair = read_pair(before, after, (_picture_name("before", before), _picture_name("after", after)))
    with captioners.use(int(choice)) as captioner:
        caption = _locate(captioner, (pair.before.image, pair.after.image), beams)
    return {**caption.as_dict(), "notes": pair.notes, "changed": change_probability(caption)}


def _locate(captioner: Any, images: tuple[Image.Image, Image.Image], beams: float) -> Any:
    """Return the caption with the box of the change and what its probability is calculated from."""
    num_beams = 1 if captioner.only_answers else int(beams)
    return next(captioner.batch([images], num_beams, sentences=scored_sentences(captioner), locate=True))


def _picture_name(side: str, path: str) -> str:
    """Return the name of an image for messages, with the visitor's file name."""
    return f"the picture {side} ({Path(path).name})"


def _capitalize(sentence: object) -> str:
    text = str(sentence)
    return text[:1].upper() + text[1:]


def _hide_traceback(function: Callable[..., Any]) -> Callable[..., Any]:
    """Show visitors a sentence for an unexpected exception, and write the traceback to the server's log."""

    def function_without_traceback(*values: Any) -> Any:
        try:
            return function(*values)
        except gr.Error:
            raise
        except Exception as error:
            text = _FAULT
            if isinstance(error, DiffcapError):
                text = _capitalize(error)
            elif "out of memory" in str(error).lower() or isinstance(error, MemoryError):
                text = "Not enough memory; try again later."
            else:
                traceback.print_exc()
            raise gr.Error(text, print_exception=False) from None

    return function_without_traceback


async def _preprocess_data(preprocess_data: Callable[..., Any], *values: Any) -> Any:
    """Replace `Blocks.preprocess_data`. Values that the page never sends give an error without a traceback in the log."""
    try:
        return await preprocess_data(*values)
    except Exception as error:
        text = error.message if isinstance(error, gr.Error) else "The request does not fit the page; reload the page."
        raise gr.Error(text, print_exception=False) from None


async def _accept_upload(
    component: gr.components.Component, upload_folder: Path, path: str | Path | None
) -> str | None:
    """Accept only uploaded files. This function replaces `Block.async_move_resource_to_block_cache`."""
    if path is None:
        return None
    real_path = Path(path).resolve()
    if not real_path.is_relative_to(upload_folder.resolve()) or not real_path.is_file():
        raise gr.Error("This file was not uploaded here, or is no longer kept; upload it again.", print_exception=False)
    component.temp_files.add(str(real_path))
    return str(real_path)
