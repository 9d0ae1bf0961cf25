"""The web page: `diffcap serve`. Needs gradio, the extra `web`."""
