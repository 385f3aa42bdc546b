-- Takes the lock if it is free, or tells who holds it.
-- KEYS[1] lock; KEYS[2] fence counter, given only for a fenced lock
-- ARGV[1] owner value; ARGV[2] TTL in ms; ARGV[3], if given: the token has a floor, see mint.lua
-- Returns {1, token} taken; {2, token, PTTL} the owner's already (token '0': no counter);
--         {0, holder's value, PTTL in ms} held; an error for a key of another type.
-- The token is drawn before SET: when that fails nothing has been taken.
local value = redis.pcall('GET', KEYS[1])
if type(value) == 'table' then return value end
if value == ARGV[1] then
  return {2, KEYS[2] and redis.call('GET', KEYS[2]) or '0', redis.call('PTTL', KEYS[1])}
end
if value then return {0, string.sub(value, 1, 256), redis.call('PTTL', KEYS[1])} end
local token = '0'
if KEYS[2] then
  local err
  token, err = mint(KEYS[2], ARGV[3])
  if not token then return {err = err} end
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return {1, token}
