"""
Scripted encode, prefill and decode engines that talk like vLLM 0.33.0.

For the demo and for tests: no model, but the same checks, reports, handles and
answers on the wire. Nothing is imported from the rest of the package, so that
a mistake of the proxy is not repeated here.

A chat request passes through the modules from top to bottom, and each of them
imports only from those above it:

* errors      EngineError, and the Failure a test asks for
* body        the body is checked                               or EngineError
* media       raw media: its bytes, and what they measure       or EngineError
* embeds      metadata or tensors in place of media: checked    or EngineError
* parts       the parts of the messages become Items            or EngineError
* memory      what an engine remembers, up to a limit
* features    an Item becomes a Feature, with its mm_hash       or EngineError
* transfers   encode reports, prefill makes a KV handle, and a
              consumer finds what it was promised, or is lost
* speech      what is said about it all
* answers     the Reply is written, whole or as a stream
* serving     pages, lifespan, and callers who leave
* engine      Simulator, one engine as an ASGI app

An EngineError has a true status. A Reply that is lost is so only after the
front-end has let the request through: it becomes a 500, or an error event in a
stream that began as 200.
"""

from epd_proxy.simulator.embeds import MODALITIES
from epd_proxy.simulator.engine import ROLES, Received, Simulator
from epd_proxy.simulator.errors import Failure

__all__ = ["MODALITIES", "ROLES", "Failure", "Received", "Simulator"]
