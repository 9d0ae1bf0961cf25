"""The web page that `diffcap serve` shows. It needs gradio, which diffcap[web] installs."""
