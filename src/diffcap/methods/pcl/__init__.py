"""IDC-PCL (Yao, Wang and Jin, AAAI 2022)."""
