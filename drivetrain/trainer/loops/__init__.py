"""The loops of the four verbs, and one optimizer step."""
