"""Fit the two images of a pair to each other, if their sizes differ or the camera moved (`--fit`)."""

from typing import Any, Literal, NamedTuple

import numpy as np
from PIL import Image

from diffcap.utils.errors import DiffcapError

Fit = Literal["stretch", "pad", "crop", "register"]
GRAY = (128, 128, 128)  # of the canvas for `pad`
# The camera's movement is found in images whose longer side has this number of pixels. The limits below were tried at this size.
_SIDE = 640
_MIN_INLIERS, _MIN_INLIER_SHARE = 25, 0.25  # points that agree with the movement, and their share of all matched points
_MIN_CORRELATION = {
    "SIFT": 0.3,
    "ECC": 0.8,
}  # of the brightness in the common area; ECC also converges for unrelated images
_MIN_OVERLAP = 0.4  # share of the image after the change that the moved image before covers
_AREAS = 0.25, 4.0  # area of the moved image relative to the image
_MIN_MOVEMENT = 0.5  # pixels; the images fit already if they differ by less


class FittedPair(NamedTuple):
    """Both images after fitting; a remark, or ""; and what was measured: "movement" in pixels, "inliers", "correlation"."""

    before: Image.Image
    after: Image.Image
    note: str = ""
    measured: dict[str, float] | None = None


def fit_pair(before: Image.Image, after: Image.Image, fit: Fit, strict: bool = False) -> FittedPair:
    """Fit two RGB images to each other.

    Args:
        fit: "stretch" leaves them unchanged, so that the captioner resizes each of them; "pad" puts both on a gray canvas, at the top
            left; "crop" cuts the middle out of both; "register" moves the image before like the camera, and cuts the common area out.
        strict: raise an error if images cannot be registered. Otherwise they stay as they are, with a note.
    """
    if fit == "pad" and before.size != after.size:
        size = max(before.width, after.width), max(before.height, after.height)
        canvases = [Image.new("RGB", size, GRAY), Image.new("RGB", size, GRAY)]
        for canvas, image in zip(canvases, (before, after)):
            canvas.paste(image, (0, 0))
        return FittedPair(*canvases)
    if fit == "crop" and before.size != after.size:
        width, height = min(before.width, after.width), min(before.height, after.height)
        corners = [((image.width - width) // 2, (image.height - height) // 2) for image in (before, after)]
        cropped = [image.crop((x, y, x + width, y + height)) for image, (x, y) in zip((before, after), corners)]
        return FittedPair(*cropped)
    return _register(before, after, strict) if fit == "register" else FittedPair(before, after)


def _register(before: Image.Image, after: Image.Image, strict: bool) -> FittedPair:
    try:
        import cv2
    except ImportError:
        raise DiffcapError("--fit register needs opencv; run: pip install 'diffcap[register]'.") from None
    cv2.setNumThreads(1)  # pairs are read in several threads
    small = [
        np.asarray(image.convert("L").resize(_small_size(image.size), Image.Resampling.BOX))
        for image in (before, after)
    ]
    method, movement, inliers, share = "SIFT", *_match_points(cv2, *small)
    if (inliers < _MIN_INLIERS or share < _MIN_INLIER_SHARE) and small[0].shape == small[1].shape:
        method, movement = "ECC", _maximize_correlation(cv2, *small)
        inliers, share = 0, 1.0
    fault, measured, covered = "too few points agree", {"inliers": float(inliers)}, None
    if movement is not None and (method == "ECC" or (inliers >= _MIN_INLIERS and share >= _MIN_INLIER_SHARE)):
        fault, measured, covered = _judge(cv2, *small, movement, method)
        measured["inliers"] = float(inliers)
    # From pixels of the small images to those of the images: a pixel's center is at 0.5.
    scales = [
        np.diag([image.width / part.shape[1], image.height / part.shape[0], 1.0])
        for image, part in zip((before, after), small)
    ]
    if "movement" in measured:
        measured["movement"] *= float(scales[1][0, 0])
    if fault or covered is None or movement is None:
        if strict and fault != "fit":
            raise DiffcapError(f"the images cannot be registered: {fault}; give another image, or leave out --strict.")
        return FittedPair(
            before, after, "" if fault == "fit" else f"not registered, {fault}; they are used as they are", measured
        )
    full = scales[1] @ movement @ np.linalg.inv(scales[0])
    moved = cv2.warpPerspective(np.asarray(before), full, after.size, flags=cv2.INTER_AREA)
    left, top, right, bottom = _inner_box(covered)
    x, y = scales[1][0, 0], scales[1][1, 1]
    box = (int(np.ceil(left * x)), int(np.ceil(top * y)), int(right * x), int(bottom * y))
    note = f"registered by {method}: moved by {measured['movement']:.1f} pixels, cut to {box[2] - box[0]} x {box[3] - box[1]}"
    return FittedPair(Image.fromarray(moved).crop(box), after.crop(box), note, measured)


def _small_size(size: tuple[int, int]) -> tuple[int, int]:
    scale = min(1.0, _SIDE / max(size))
    return max(1, round(size[0] * scale)), max(1, round(size[1] * scale))


def _match_points(cv2: Any, before: Any, after: Any) -> tuple[Any, int, float]:
    """Return the homography from `before` to `after` by SIFT and RANSAC, the number of inliers, and their share. None: too few points."""
    detector = cv2.SIFT_create(3000)
    (points, features), (other_points, other_features) = (
        detector.detectAndCompute(image, None) for image in (before, after)
    )
    if features is None or other_features is None or min(len(points), len(other_points)) < 8:
        return None, 0, 0.0
    matches = [match for match in cv2.BFMatcher(cv2.NORM_L2).knnMatch(features, other_features, k=2) if len(match) == 2]
    good = [first for first, second in matches if first.distance < 0.8 * second.distance]  # Lowe's ratio test
    if len(good) < 8:
        return None, 0, 0.0
    sources = np.float32([points[match.queryIdx].pt for match in good])
    targets = np.float32([other_points[match.trainIdx].pt for match in good])
    movement, mask = cv2.findHomography(sources, targets, cv2.RANSAC, 3.0)
    return (None, 0, 0.0) if movement is None else (movement, int(mask.sum()), float(mask.mean()))


def _maximize_correlation(cv2: Any, before: Any, after: Any) -> Any:
    """Return the affine movement (3, 3) that maximizes the correlation of the brightness (ECC), for images with few corners, or None."""
    criteria = cv2.TERM_CRITERIA_EPS | cv2.TERM_CRITERIA_COUNT, 100, 1e-5
    try:
        _, affine = cv2.findTransformECC(
            before, after, np.eye(2, 3, dtype=np.float32), cv2.MOTION_AFFINE, criteria, None, 5
        )
    except cv2.error:  # it does not converge
        return None
    return np.vstack([affine, [0, 0, 1]]).astype(float)


def _judge(cv2: Any, before: Any, after: Any, movement: Any, method: str) -> tuple[str, dict[str, float], Any]:
    """Return why a movement is refused ("fit": the images fit already; "": accepted), what was measured, and the covered pixels."""
    height, width = before.shape
    corners = np.float32([[0, 0], [width, 0], [width, height], [0, height]])[:, None]
    moved_corners = cv2.perspectiveTransform(corners.astype(float), movement)[:, 0].astype(np.float32)
    area = cv2.contourArea(moved_corners) / (height * width)
    size = after.shape[1], after.shape[0]
    covered = cv2.warpPerspective(np.ones((height, width), np.uint8), movement, size) > 0
    moved = cv2.warpPerspective(before, movement, size)
    measured = {"movement": float(np.linalg.norm(moved_corners - corners[:, 0], axis=1).mean())}
    if not cv2.isContourConvex(moved_corners) or not _AREAS[0] < area < _AREAS[1]:
        return "the movement found is not that of a camera", measured, covered
    if covered.mean() < _MIN_OVERLAP:
        return f"less than {_MIN_OVERLAP:.0%} in common", measured, covered
    measured["correlation"] = _correlation(moved[covered], after[covered])
    if measured["correlation"] < _MIN_CORRELATION[method]:
        return "the common area does not agree", measured, covered
    is_same_size = before.shape == after.shape
    if is_same_size and (measured["movement"] < _MIN_MOVEMENT or measured["correlation"] < _correlation(before, after)):
        return "fit", measured, covered
    return "", measured, covered


def _correlation(first: Any, second: Any) -> float:
    return float(np.nan_to_num(np.corrcoef(first.ravel().astype(float), second.ravel().astype(float))[0, 1]))


def _inner_box(mask: Any) -> tuple[int, int, int, int]:
    """Return a large box (left, top, right, bottom) of pixels that are all True: the side with the fewest of them is cut repeatedly."""
    left, top, right, bottom = 0, 0, mask.shape[1], mask.shape[0]
    while not (area := mask[top:bottom, left:right]).all():
        shares = [area[:, 0].mean(), area[0].mean(), area[:, -1].mean(), area[-1].mean()]
        side = int(np.argmin(shares))
        left, top, right, bottom = left + (side == 0), top + (side == 1), right - (side == 2), bottom - (side == 3)
    return left, top, right, bottom
