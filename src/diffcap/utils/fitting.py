"""Fit the two images of a pair to each other, if their sizes differ or the camera moved (`--fit`)."""

from typing import Any, Literal, NamedTuple

import numpy as np
from PIL import Image

from diffcap.utils.errors import DiffcapError

Fit = Literal["stretch", "pad", "crop", "register"]
GRAY = (128, 128, 128)  # of the canvas for `pad`
NOT_REGISTERED = "not registered"  # start of a note
# The camera's movement is found in images whose longer side has this number of pixels. The limits below were tried at this size.
_SIDE = 640
_MIN_INLIERS, _MIN_INLIER_SHARE = 25, 0.25  # points that agree with the movement, and their share of all matched points
# Smallest correlation of the brightness in the common area. ECC also converges for unrelated images, so it needs a high one.
_MIN_CORRELATION = {"SIFT": 0.3, "ECC": 0.8}
_FITS = "the images fit already"
_MIN_MOVEMENT = 0.5  # pixels; the images fit already if they differ by less
_MAX_ERROR = 2  # pixels; they also fit if they differ by less, and the movement found makes them agree less


class FittedPair(NamedTuple):
    """Two RGB images after fitting."""

    before: Image.Image
    after: Image.Image
    note: str = ""  # what was done, or why nothing was done
    measured: dict[str, float] | None = None  # "movement" in pixels, "inliers", "correlation"
    origin: tuple[int, int] = (0, 0)  # where the upper left corner of both lies in the image after


def fit_pair(before: Image.Image, after: Image.Image, fit: Fit, strict: bool = False) -> FittedPair:
    """Fit two RGB images to each other.

    Args:
        fit: "stretch" leaves them unchanged, so that the captioner resizes each of them; "pad" puts both on a gray canvas, at the top
            left; "crop" cuts the middle out of both; "register" moves the image before like the camera, and cuts the common area out.
        strict: raise an error if images cannot be registered. Otherwise they stay as they are, with a note.
    """
    if fit == "register":
        return _register(before, after, strict)
    if fit == "stretch" or before.size == after.size:
        return FittedPair(before, after)
    choose = max if fit == "pad" else min
    width, height = choose(before.width, after.width), choose(before.height, after.height)
    canvases, corner = [], (0, 0)
    for image in (before, after):
        corner = max(image.width - width, 0) // 2, max(image.height - height, 0) // 2
        canvases.append(Image.new("RGB", (width, height), GRAY))
        canvases[-1].paste(image, (-corner[0], -corner[1]))
    note = f"both are {'padded' if fit == 'pad' else 'cropped'} to {width:,} x {height:,} pixels"
    return FittedPair(canvases[0], canvases[1], note, origin=corner)


def load_opencv() -> Any:
    """Import opencv, which "register" needs."""
    try:
        import cv2
    except ImportError:
        raise DiffcapError("--fit register needs opencv; run: pip install 'diffcap[register]'.") from None
    cv2.setNumThreads(1)  # pairs are read in several threads
    return cv2


def _register(before: Image.Image, after: Image.Image, strict: bool) -> FittedPair:
    cv2 = load_opencv()
    (small_before, enlarge_before), (small_after, enlarge) = _shrink(before), _shrink(after)
    if np.array_equal(small_before, small_after):  # also images without any point, such as a blank page
        return FittedPair(before, after)
    method = "SIFT"
    movement, inliers = _match_points(cv2, small_before, small_after)
    if movement is None:
        method, movement = "ECC", _maximize_correlation(cv2, small_before, small_after)
    fault, measured, covered = _judge(cv2, small_before, small_after, movement, _MIN_CORRELATION[method])
    if measured:
        measured["movement"] *= enlarge[0, 0]
    measured["inliers"] = inliers
    if strict and fault not in ("", _FITS):
        raise DiffcapError(f"the images cannot be registered: {fault}; give another image, or leave out --strict.")
    if fault:
        note = "" if fault == _FITS else f"{NOT_REGISTERED}, {fault}; they are used as they are"
        return FittedPair(before, after, note, measured)
    full_movement = enlarge @ movement @ np.linalg.inv(enlarge_before)
    moved = cv2.warpPerspective(np.asarray(before), full_movement, after.size, flags=cv2.INTER_AREA)
    x, y = enlarge.diagonal()[:2]
    left, top, right, bottom = _inner_box(covered)
    box = int(np.ceil(left * x)), int(np.ceil(top * y)), int(right * x), int(bottom * y)
    size = f"{box[2] - box[0]:,} x {box[3] - box[1]:,}"
    note = f"registered by {method}: moved by {measured['movement']:.1f} pixels, both are cut to {size} pixels"
    return FittedPair(Image.fromarray(moved).crop(box), after.crop(box), note, measured, box[:2])


def _shrink(image: Image.Image) -> tuple[Any, Any]:
    """Return the brightness of an image, (h, w), and the matrix (3, 3) from its pixels to those of the image."""
    gray = image.convert("L")
    gray.thumbnail((_SIDE, _SIDE), Image.Resampling.BOX)
    x, y = np.divide(image.size, gray.size)
    enlarge = np.array([[x, 0, (x - 1) / 2], [0, y, (y - 1) / 2], [0, 0, 1]])  # pixel centers are at 0, 1, ...
    return np.asarray(gray), enlarge


def _match_points(cv2: Any, before: Any, after: Any) -> tuple[Any, int]:
    """Return the homography from `before` to `after` by SIFT and RANSAC, and the number of inliers. None: too few points agree."""
    detector = cv2.SIFT_create(3000)
    points, features = detector.detectAndCompute(before, None)
    other_points, other_features = detector.detectAndCompute(after, None)
    if min(len(points), len(other_points)) < 8:
        return None, 0
    matches = cv2.BFMatcher(cv2.NORM_L2).knnMatch(features, other_features, k=2)
    good = [first for first, second in matches if first.distance < 0.8 * second.distance]  # Lowe's ratio test
    if len(good) < 8:
        return None, 0
    sources = np.array([points[match.queryIdx].pt for match in good], np.float32)
    targets = np.array([other_points[match.trainIdx].pt for match in good], np.float32)
    movement, mask = cv2.findHomography(sources, targets, cv2.RANSAC, 3.0)
    if movement is None:
        return None, 0
    agrees = mask.sum() >= _MIN_INLIERS and mask.mean() >= _MIN_INLIER_SHARE
    return movement if agrees else None, int(mask.sum())


def _maximize_correlation(cv2: Any, before: Any, after: Any) -> Any:
    """Return the affine movement (3, 3) that maximizes the correlation of the brightness (ECC), for images with few corners, or None."""
    if before.shape != after.shape:
        return None
    start = np.eye(2, 3, dtype=np.float32)
    criteria = cv2.TERM_CRITERIA_EPS | cv2.TERM_CRITERIA_COUNT, 100, 1e-5
    try:
        _, affine = cv2.findTransformECC(before, after, start, cv2.MOTION_AFFINE, criteria, None, 5)
    except cv2.error:  # it does not converge
        return None
    return np.vstack([affine, [0, 0, 1]]).astype(float)


def _judge(cv2: Any, before: Any, after: Any, movement: Any, threshold: float) -> tuple[str, dict[str, float], Any]:
    """Return why a movement is refused ("": it is accepted), what was measured, and the covered pixels of the image after."""
    if movement is None:
        return "too few points agree", {}, None
    height, width = before.shape
    size = after.shape[::-1]
    corners = np.array([[0, 0], [width, 0], [width, height], [0, height]], float)
    resized_corners = corners * np.divide(size, (width, height))
    moved_corners = cv2.perspectiveTransform(corners[:, None], movement)[:, 0].astype(np.float32)
    area = cv2.contourArea(moved_corners) / before.size  # relative to that of the image before
    covered = cv2.warpPerspective(np.ones_like(before), movement, size) > 0
    moved = cv2.warpPerspective(before, movement, size)
    measured = {"movement": float(np.linalg.norm(moved_corners - resized_corners, axis=1).mean())}
    if not cv2.isContourConvex(moved_corners) or not 0.25 < area < 4:
        return "the movement found is not that of a camera", measured, covered
    if covered.mean() < 0.4:
        return "less than 40% in common", measured, covered
    measured["correlation"] = _correlation(moved[covered], after[covered])
    if measured["correlation"] < threshold:
        return "the common area does not agree", measured, covered
    if before.shape == after.shape:
        agrees_less = measured["correlation"] < _correlation(before, after)
        if measured["movement"] < (_MAX_ERROR if agrees_less else _MIN_MOVEMENT):
            return _FITS, measured, covered
        if agrees_less:
            return "they agree better as they are", measured, covered
    return "", measured, covered


def _correlation(first: Any, second: Any) -> float:
    return float(np.nan_to_num(np.corrcoef(first.ravel(), second.ravel())[0, 1]))


def _inner_box(mask: Any) -> list[int]:
    """Return a large box (left, top, right, bottom) of pixels that are all True: the side with the fewest of them is cut repeatedly."""
    box = [0, 0, mask.shape[1], mask.shape[0]]
    while not (area := mask[box[1] : box[3], box[0] : box[2]]).all():
        sides = area[:, 0], area[0], area[:, -1], area[-1]
        side = int(np.argmin([pixels.mean() for pixels in sides]))
        box[side] += 1 if side < 2 else -1
    return box
