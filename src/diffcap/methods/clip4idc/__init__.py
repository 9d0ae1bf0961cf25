"""CLIP4IDC (Guo, Wang and Laaksonen, AACL 2022)."""
