"""SCORER with CBR (Tu et al., ICCV 2023)."""
