"""Hard negative captions for IDC-PCL's fine-grained difference aligning: retrieved, replaced and confused."""
