-- What release.lua and wait.lua have in common; it stands before both. K lock; Q sorted set of the
-- owners that wait, by ticket; W hash of owner to 'call deadline lease fencing verb channel', times
-- in ms; F fence counter. A broken counter or full memory must not stop a release, so errors are caught.
-- Returns nothing itself. first: the first live waiter and its entry, the dead before it dropped;
-- mint: a new token, or nil and an error; hand: gives K to the first live waiter that can be given
-- it and tells it on its channel, unless that is mine; {1, owner, call, token}, nil: nobody.
local function time()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end
local function drop(Q, W, owner)
  redis.pcall('ZREM', Q, owner)
  redis.pcall('HDEL', W, owner)
end
local function alive(W, owner)
  local text = redis.pcall('HGET', W, owner)
  local e = {string.match(type(text) == 'string' and text or '', '^(%d+) (%d+) (%d+) (%d) (%u*) (.*)$')}
  return e[1] and tonumber(e[2]) >= time() and e
end
local function first(Q, W)
  while true do
    local owner = redis.pcall('ZRANGE', Q, 0, 0)[1]
    local e = owner and alive(W, owner)
    if e or not owner then return owner, e end
    drop(Q, W, owner)
  end
end
local function mint(F)
  local n = redis.pcall('INCR', F)
  if type(n) == 'table' then return nil, n.err end
  return redis.call('GET', F)
end
local function hand(K, Q, W, F, mine)
  while true do
    local owner, e = first(Q, W)
    if not owner then return end
    drop(Q, W, owner)
    local token = e[4] == '0' and '0' or mint(F)
    if token and not redis.pcall('SET', K, owner, 'PX', e[3]).err then
      if e[6] ~= mine and e[6] ~= '' then redis.pcall(e[5], e[6], e[1] .. ' ' .. token .. ' ' .. owner) end
      return {1, owner, tonumber(e[1]), token}
    end
  end
end
