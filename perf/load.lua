-- For wrk: the same body again and again, and the outcome as one line of JSON.

local file = assert(io.open(os.getenv("PERF_BODY"), "rb"))
wrk.method = "POST"
wrk.path = "/v1/chat/completions"
wrk.headers["content-type"] = "application/json"
wrk.body = file:read("*a")
file:close()

done = function(summary, latency)
  local e = summary.errors
  local line = '{"requests": %d, "micros": %d, "bytes": %d, "p50": %.3f, "p99": %.3f, '
    .. '"connect": %d, "read": %d, "write": %d, "status": %d, "timeout": %d}\n'
  io.write(line:format(summary.requests, summary.duration, summary.bytes,
    latency:percentile(50) / 1000, latency:percentile(99) / 1000,
    e.connect, e.read, e.write, e.status, e.timeout))
end
