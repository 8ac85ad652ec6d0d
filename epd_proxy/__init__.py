"""
One OpenAI-compatible server in front of vLLM servers split into encode, prefill and decode.

    from epd_proxy import Config, EPDProxy

    app = EPDProxy(config=Config(encode="http://e:8000", decode="http://pd:8000"))
"""

from epd_proxy.app import EPDProxy
from epd_proxy.config import Config, InstanceConfig
from epd_proxy.errors import ConfigError, ProxyError
from epd_proxy.registry import Instance, Role
from epd_proxy.selectors import Random, RoundRobin, Selector, Weighted

__version__ = "0.1.0"

__all__ = [
    "Config",
    "ConfigError",
    "EPDProxy",
    "Instance",
    "InstanceConfig",
    "ProxyError",
    "Random",
    "Role",
    "RoundRobin",
    "Selector",
    "Weighted",
]
