raise SystemExit("error: view.py is a tool now: python -m tools.view")
