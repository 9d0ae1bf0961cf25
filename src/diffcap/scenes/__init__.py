"""Change captions of whole rasters: two dates on one grid, read and captioned tile by tile."""
