import os

# transformers, wherever it is imported first, says that PyTorch is missing, which nothing here needs.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
