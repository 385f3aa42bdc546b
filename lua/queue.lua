-- The queue of waiters, put after mint.lua and before release.lua and wait.lua. K lock; Q sorted set of the owners that
-- wait, by ticket; W hash of owner to 'call deadline lease fencing:holds verb channel', times in ms; F fence
-- counter. A broken counter or full memory must not stop a release, so errors are caught.
-- Returns nothing itself. first: the first live waiter, the dead before it dropped; tell: sends it text
-- unless its channel is mine; hand: gives K to the first live waiter that can be given it, with a token
-- if its fencing is 1, or 2 for a floor, and tells it; returns {1, owner, call, token}, or nil (nobody) and perhaps an error.
local function time()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end
local function drop(Q, W, owner)
  redis.pcall('ZREM', Q, owner)
  redis.pcall('HDEL', W, owner)
end
local function alive(W, owner, now)
  local text = redis.pcall('HGET', W, owner)
  local n, deadline, rest = string.match(type(text) == 'string' and text or '', '^(%d+) (%d+) (.*)$')
  return n and tonumber(deadline) >= (now or time()) and n, rest
end
local function first(Q, W)
  while true do
    local owner = redis.pcall('ZRANGE', Q, 0, 0)[1]
    if not owner or alive(W, owner) then return owner end
    redis.call('ZREM', Q, owner) -- one that is refused must end this
    redis.pcall('HDEL', W, owner)
  end
end
local function tell(rest, mine, text)
  local verb, channel = string.match(rest, '^%d+ %d%S* (%u*) (.*)$')
  if channel ~= mine and channel ~= '' then redis.pcall(verb, channel, text) end
end
local function hand(K, Q, W, F, mine)
  while true do
    local popped = redis.pcall('ZPOPMIN', Q)
    local owner = popped[1]
    if not owner then return nil, popped.err end
    local n, rest = alive(W, owner)
    redis.pcall('HDEL', W, owner)
    if n then
      local lease, fenced = string.match(rest, '^(%d+) (%d)')
      local token = fenced == '0' and '0' or mint(F, fenced == '2')
      if token and not redis.pcall('SET', K, owner, 'PX', lease).err then
        tell(rest, mine, n .. ' ' .. token .. ' ' .. owner)
        return {1, owner, tonumber(n), token}
      end
    end
  end
end
