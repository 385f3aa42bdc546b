-- One call of each of several waiters: takes the lock if it is free and nobody is before, or else
-- takes or keeps a place in the queue. KEYS[4i-3] lock, KEYS[4i-2] queue, KEYS[4i-1] waiters, KEYS[4i] fence counter;
-- ARGV[6i-5] owner value; ARGV[6i-4] its call's number; ARGV[6i-3] TTL in ms; ARGV[6i-2] ms that the place
-- is kept; ARGV[6i-1] most waiters, 0 any; ARGV[6i] 'lease fencing:holds verb channel' for a hand-over, lease in ms
-- Returns for each: {1, token} taken; {2, token, PTTL} the owner's already; {0, holder's value, PTTL,
--         waiters before it, 1 for any when new} queued; {-1, holder's value, PTTL} the queue is full; {-2, text} error.
local function full(Q, W, most)
  local over = redis.call('ZCARD', Q) - most
  if over < 0 then return false end
  local now = time()
  for _, owner in ipairs(redis.call('ZRANGE', Q, 0, -1)) do
    if not alive(W, owner, now) then
      drop(Q, W, owner)
      over = over - 1
      if over < 0 then return false end
    end
  end
  return true
end
local function call(K, Q, W, F, owner, n, ttl, window, most, data)
  local fenced = string.match(data, '^%d+ ([12])')
  local value = redis.pcall('GET', K)
  if type(value) == 'table' then return {-2, value.err} end
  if value == owner then
    drop(Q, W, owner)
    return {2, fenced and redis.call('GET', F) or '0', redis.call('PTTL', K)}
  end
  if not value then
    local head = first(Q, W)
    if head and head ~= owner then
      local _, err = hand(K, Q, W, F)
      if err then return {-2, err} end
      return call(K, Q, W, F, owner, n, ttl, window, most, data)
    end
    local token, err = '0'
    if fenced then token, err = mint(F, fenced == '2') end
    if not token then return {-2, err} end
    local set = redis.pcall('SET', K, owner, 'PX', ttl)
    if set.err then return {-2, set.err} end
    drop(Q, W, owner)
    return {1, token}
  end
  if most > 0 and not redis.call('ZSCORE', Q, owner) and full(Q, W, most) then
    return {-1, string.sub(value, 1, 256), redis.call('PTTL', K)}
  end
  local now = time()
  local text = n .. ' ' .. string.format('%.0f', now + window) .. ' ' .. data -- %s would end at a NUL
  local before = redis.call('HSET', W, owner, text) == 0 and redis.call('ZRANK', Q, owner)
  redis.call('PEXPIRE', W, 5000)
  if not before then -- it is new
    local last = redis.call('ZRANGE', Q, -1, -1, 'WITHSCORES')
    redis.call('ZADD', Q, math.max((last[2] or 0) + 1, now), owner) -- so that it tells since when
    before = last[1] and 1 or 0
  end
  redis.call('PEXPIRE', Q, 5000)
  return {0, string.sub(value, 1, 256), redis.call('PTTL', K), before}
end
local out = {}
for i = 1, #KEYS / 4 do
  out[i] = call(KEYS[4 * i - 3], KEYS[4 * i - 2], KEYS[4 * i - 1], KEYS[4 * i], ARGV[6 * i - 5], ARGV[6 * i - 4],
    ARGV[6 * i - 3], ARGV[6 * i - 2], tonumber(ARGV[6 * i - 1]), ARGV[6 * i])
end
return out
