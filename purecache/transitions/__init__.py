"""Pure transition functions `(state, inputs) -> Step(state, effects, reply)`: no clock, thread, file or pool."""

from purecache.state.layout import TransferKind
from purecache.transitions.advance import advance
from purecache.transitions.backup import begin_backup, finish_backup
from purecache.transitions.evict import evict_device, evict_host
from purecache.transitions.forget import forget, forget_namespace
from purecache.transitions.fork import copy_page, fork
from purecache.transitions.insert import Offer, insert
from purecache.transitions.lend import allocate, release
from purecache.transitions.load_back import begin_load_back, finish_load_back
from purecache.transitions.locks import ReceiptHandle, lock, unlock
from purecache.transitions.match import match, match_many, peek
from purecache.transitions.operations import Handle
from purecache.transitions.prefetch import begin_prefetch, finish_prefetch
from purecache.transitions.requests import abort, admit, checkpoint, finish
from purecache.transitions.reset import reset
from purecache.transitions.resize import grow_device, grow_host, shrink_device, shrink_host
from purecache.transitions.store import begin_store, finish_store
from purecache.transitions.value_storage import finish_value_prefetch, finish_value_store
from purecache.transitions.value_transfers import finish_value_backup, finish_value_load
from purecache.transitions.vocabulary import NodeHandle, Status, Step, Transfers
from purecache.transitions.walk import Prompt, Space

__all__ = [
    "Handle",
    "NodeHandle",
    "Offer",
    "Prompt",
    "ReceiptHandle",
    "Space",
    "Status",
    "Step",
    "TransferKind",
    "Transfers",
    "abort",
    "admit",
    "advance",
    "allocate",
    "begin_backup",
    "begin_load_back",
    "begin_prefetch",
    "begin_store",
    "checkpoint",
    "copy_page",
    "evict_device",
    "evict_host",
    "finish",
    "finish_backup",
    "finish_load_back",
    "finish_prefetch",
    "finish_store",
    "finish_value_backup",
    "finish_value_load",
    "finish_value_prefetch",
    "finish_value_store",
    "forget",
    "forget_namespace",
    "fork",
    "grow_device",
    "grow_host",
    "insert",
    "lock",
    "match",
    "match_many",
    "peek",
    "release",
    "reset",
    "shrink_device",
    "shrink_host",
    "unlock",
]
