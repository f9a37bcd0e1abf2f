raise SystemExit("error: study.py is a tool now: python -m tools.study")
