"""From files to batches: documents, training and validation split, token shards on disk, windows. NumPy, no torch.

corpus = documents(["notes/", "chats.jsonl.gz"])
training, validation = split(corpus, share=0.1)
tokenizer = make(BytePairConfig(vocabulary=4096), training.texts())
shards = build(training, tokenizer, "run/tokens/training")
batch = Batches(shards, batch=12, context=64, seed=0).at(step=0)
"""

from .batches import IGNORED, Batch, Batches, windows
from .build import build
from .chat import CHAT_TEMPLATE, chat
from .corpus import Corpus, DataError, Document
from .masking import TokenMasking
from .python_corpus import standard_library
from .shards import Shards
from .sources import documents
from .split import split

__all__ = [
    "Document", "Corpus", "DataError", "documents", "standard_library", "split", "chat", "CHAT_TEMPLATE",
    "build", "Shards", "Batch", "Batches", "windows", "TokenMasking", "IGNORED",
]  # fmt: skip
