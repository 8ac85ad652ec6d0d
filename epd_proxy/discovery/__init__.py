"""
Where the fleet comes from, beside flags and the admin API: a file, DNS, Redis.

* ``sources``  what the three have in common: telling the fleet, saying what is wrong
* ``files``    a file that is read again when it changes
* ``names``    DNS names that stand for all their addresses; ``resolvers`` look them up
* ``store``    one fleet in Redis, for any number of workers and machines; ``scripts`` run there

Each tells the whole of what it knows whenever that changes, and tells it again while the registry
refuses it. What cannot be read or reached leaves the fleet as it is.
"""

from epd_proxy.discovery.files import FileSource
from epd_proxy.discovery.names import NameSource, normalised_name
from epd_proxy.discovery.sources import Source, Tell
from epd_proxy.discovery.store import Away, Entry, Store

__all__ = [
    "Away",
    "Entry",
    "FileSource",
    "NameSource",
    "Source",
    "Store",
    "Tell",
    "normalised_name",
]
