raise SystemExit("error: this is a tool now: python -m tools.pack")
