"""
What Redis does for the fleet, each script in one go, so that two proxies never half-see each other.

Keys, behind a prefix:

* ``instance:URL``  an entry as JSON, with the expiry that its ``ttl`` says
* ``roles``         hash of URL to role: which instances there are
* ``draining``      set of the URLs that drain, of instances from other sources too
* ``state``         hash: ``version`` counts the changes (a repeated registration is none),
                    ``memory`` names this run of versions
* ``changes``       not a key but the channel on which each new version is told

Every script gets as ``KEYS`` the prefix, roles, draining and state, and as ``ARGV[1]`` a name for
the memory if there is none yet. It answers with a result and all there is: memory, version,
entries, draining.

A memory that is another one than before, or older, was lost: the server was flushed, or restarted
without its data. ``RESTORE`` then puts back what a proxy still knows.
"""

_COMMON = """
local prefix, roles, draining, state = KEYS[1], KEYS[2], KEYS[3], KEYS[4]

local function forget(url)
  redis.call('DEL', prefix .. 'instance:' .. url)
  local known = redis.call('HDEL', roles, url)
  if known == 1 then redis.call('SREM', draining, url) end
  return known
end

-- Expiry has taken the entry alone.
for _, url in ipairs(redis.call('HKEYS', roles)) do
  if redis.call('EXISTS', prefix .. 'instance:' .. url) == 0 then forget(url) end
end

local function put(url, entry, ttl)
  if ttl == '' then
    redis.call('SET', prefix .. 'instance:' .. url, entry)
  else
    redis.call('SET', prefix .. 'instance:' .. url, entry, 'PX', ttl)
  end
end

-- Another role of the same URL, or split roles beside whole ones: what stands in the way.
local function conflict(url, role)
  local all = redis.call('HGETALL', roles)
  for i = 1, #all, 2 do
    local whole = all[i + 1] == 'prefill_decode' or role == 'prefill_decode'
    local encode = all[i + 1] == 'encode' or role == 'encode'
    if all[i + 1] ~= role and (all[i] == url or (whole and not encode)) then
      return {all[i], all[i + 1]}
    end
  end
end

local function changed(least)
  local version = math.max(tonumber(redis.call('HGET', state, 'version') or 0), least or 0) + 1
  redis.call('HSETNX', state, 'memory', ARGV[1])
  redis.call('HSET', state, 'version', version)
  redis.call('PUBLISH', prefix .. 'changes', version)
end

local function all(result)
  local entries = {}
  for i, url in ipairs(redis.call('HKEYS', roles)) do
    entries[i] = redis.call('GET', prefix .. 'instance:' .. url)
  end
  return {
    result,
    redis.call('HGET', state, 'memory') or '',
    tonumber(redis.call('HGET', state, 'version') or 0),
    entries,
    redis.call('SMEMBERS', draining),
  }
end
"""

LOAD = f"{_COMMON} return all(0)"

# ARGV: memory, URL, role, entry, milliseconds to live or nothing.
REGISTER = f"""{_COMMON}
local url, role, entry, ttl = ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local other = conflict(url, role)
if other then return all(other) end
local before = redis.call('GET', prefix .. 'instance:' .. url)
put(url, entry, ttl)
redis.call('HSET', roles, url, role)
if before ~= entry then changed() end
return all(before and 0 or 1)
"""

# ARGV: memory, URL.
DEREGISTER = f"""{_COMMON}
local removed = forget(ARGV[2])
if removed == 1 then changed() end
return all(removed)
"""

# ARGV: memory, URL, SADD or SREM.
DRAIN = f"""{_COMMON}
local moved = redis.call(ARGV[3], draining, ARGV[2])
if moved == 1 then changed() end
return all(moved)
"""

# ARGV: the memory and version last seen, 1 if the server was away since, the number of entries,
# for each its URL, role, entry, milliseconds; the URLs that drain. Whoever comes later than
# others, who have gone on, adds nothing.
RESTORE = f"""{_COMMON}
local known = tonumber(ARGV[2])
local memory = redis.call('HGET', state, 'memory') or ''
local version = tonumber(redis.call('HGET', state, 'version') or 0)
local lost = memory ~= ARGV[1] or version < known
if not lost and not (ARGV[3] == '1' and version == known) then return all(0) end
local added, last = 0, 4 + 4 * tonumber(ARGV[4])
for i = 5, last, 4 do
  local url, role = ARGV[i], ARGV[i + 1]
  if redis.call('HEXISTS', roles, url) == 0 and not conflict(url, role) then
    put(url, ARGV[i + 2], ARGV[i + 3])
    redis.call('HSET', roles, url, role)
    added = added + 1
  end
end
for i = last + 1, #ARGV do
  added = added + redis.call('SADD', draining, ARGV[i])
end
if added > 0 then
  redis.call('HSET', state, 'memory', ARGV[1])
  changed(known)
end
return all(added)
"""
