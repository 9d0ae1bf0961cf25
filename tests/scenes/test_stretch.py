import numpy as np
import pytest

from diffcap.scenes.raster import PERCENTILES, TILES, Sample, fit_stretch, to_rgb
from diffcap.utils.errors import DiffcapError
from diffcap.worlds.tiles.write import render_pair

RANDOM = np.random.default_rng(0)


def sample(dtype: str = "uint16", bands: int = 3) -> Sample:
    before, after = (RANDOM.integers(0, 60_000, (bands, 30, 40)).astype(dtype) for _ in range(2))
    return Sample(before, after, RANDOM.random((30, 40)) < 0.9, RANDOM.random((30, 40)) < 0.7)


@pytest.mark.parametrize("given, used", [(None, (2, 98)), ((5, 50), (5, 50))])
def test_percentiles_are_those_of_both_dates(given: tuple[float, float] | None, used: tuple[float, float]) -> None:
    scene = sample()
    stretch = fit_stretch(scene, given)
    assert stretch is not None
    for band in range(3):
        values = [*scene.before[band][scene.before_valid], *scene.after[band][scene.after_valid]]
        low, high = np.percentile(values, used[0]), np.percentile(values, used[1])
        assert (stretch.low[band], stretch.high[band]) == pytest.approx((low, high))
        image = to_rgb(scene.before, scene.before_valid, stretch)
        expected = np.rint(np.clip((scene.before[band] - low) / (high - low), 0, 1) * 255)
        assert np.abs(image[..., band] - np.where(scene.before_valid, expected, 0)).max() <= 1  # float32
        assert not image[~scene.before_valid].any()


def test_pixels_of_8_bits_are_stretched_only_on_request() -> None:
    scene = sample("uint8")
    assert fit_stretch(scene, None) is None and fit_stretch(scene, (2, 98)) is not None
    shown = np.ones((30, 40), bool)
    assert np.array_equal(to_rgb(scene.before, shown, None), scene.before.transpose(1, 2, 0))


def test_percentiles_become_given_levels() -> None:
    scene, shown = sample(), np.ones((30, 40), bool)
    for chosen, levels in ((scene, TILES), (sample(bands=1), tuple((np.mean(each),) for each in TILES))):
        stretch = fit_stretch(chosen, None, TILES)
        full = fit_stretch(chosen, None)
        assert stretch is not None and full is not None
        for band, (dark, bright) in enumerate(zip(*levels)):
            values = np.array([full.low[band], full.high[band]])
            found = (values - stretch.low[band]) / (stretch.high[band] - stretch.low[band]) * 255
            assert found == pytest.approx([dark, bright])
            image = to_rgb(chosen.before, shown, stretch)[..., band]
            assert abs(float(np.percentile(image, 2)) - dark) < 6 and abs(float(np.percentile(image, 98)) - bright) < 6
    assert fit_stretch(sample("uint8"), None, TILES) is None


def test_the_levels_of_tiles_are_those_of_its_images() -> None:
    pixels = np.concatenate([image.reshape(-1, 3) for number in range(60) for image in render_pair(number, 3).images])
    assert (
        np.abs(np.percentile(pixels, PERCENTILES, axis=0) - TILES).max() < 15
    )  # 60 pairs; the levels are those of 800


def test_constant_and_single_bands() -> None:
    gray = sample(bands=1)
    image = to_rgb(gray.after, gray.after_valid, fit_stretch(gray, None))
    assert image.shape == (30, 40, 3) and (image[..., :1] == image).all()
    flat = gray._replace(before=np.full((1, 30, 40), 7, "uint16"), after=np.full((1, 30, 40), 7, "uint16"))
    assert not to_rgb(flat.before, flat.before_valid, fit_stretch(flat, None)).any()


def test_not_a_number_is_black() -> None:
    pixels = np.full((1, 2, 2), np.nan, np.float32)
    pixels[0, 0, 0] = 3
    valid = np.isfinite(pixels)[0]
    stretch = fit_stretch(Sample(pixels, pixels, valid, valid), (0, 100))
    assert not to_rgb(pixels, valid, stretch)[~valid].any()


def test_no_pixel_with_data() -> None:
    scene = sample()
    nothing = np.zeros((30, 40), bool)
    with pytest.raises(DiffcapError, match="no pixel of the two rasters has data"):
        fit_stretch(scene._replace(before_valid=nothing, after_valid=nothing), None)
