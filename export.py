raise SystemExit("error: export.py is a tool now: python -m tools.export")
