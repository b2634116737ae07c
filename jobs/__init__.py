"""What a person starts: one thin file a verb. `overnight <verb>` and `python jobs/<verb>.py` are the same parser."""
