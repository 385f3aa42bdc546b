-- Takes the lock if it is free, or tells who holds it.
-- KEYS[1] lock; KEYS[2] fence counter, given only for a fenced lock
-- ARGV[1] owner value; ARGV[2] TTL in ms
-- Returns {1, token} taken; {2, token, PTTL} the owner's already (token '0': no counter);
--         {0, holder's value, PTTL in ms} held; an error for a key of another type.
-- INCR stands before SET: when it fails nothing has been taken.
local value = redis.pcall('GET', KEYS[1])
if type(value) == 'table' then return value end
if value == ARGV[1] then
  return {2, KEYS[2] and redis.call('GET', KEYS[2]) or '0', redis.call('PTTL', KEYS[1])}
end
if value then return {0, string.sub(value, 1, 256), redis.call('PTTL', KEYS[1])} end
local token = '0'
if KEYS[2] then
  local n = redis.pcall('INCR', KEYS[2])
  if type(n) == 'table' then return n end
  token = redis.call('GET', KEYS[2])
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return {1, token}
