"""RSICCformer (Liu et al., TGRS 2022) and Chg2Cap (Chang and Ghamisi, TIP 2023), which share parts."""
