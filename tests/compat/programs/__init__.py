"""Programs as users of these packages write them; `made_here.py` gives them a model and texts."""
