-- Gives a held lock back to an instance that lost it or never had it, if that has seen no greater token.
-- KEYS[1] lock; KEYS[2] fence counter; KEYS[3] floor of all counters
-- ARGV[1] value: owner and token; ARGV[2] TTL in ms; ARGV[3] token; ARGV[4] how far it may be ahead of TIME, in us
-- Returns {1} given; {2} it had it, what is left of the lease raised to the TTL; {0} not given.
local value = redis.pcall('GET', KEYS[1])
if type(value) == 'table' then return {0} end
if value == ARGV[1] then
  local left = redis.call('PTTL', KEYS[1])
  redis.call('PEXPIRE', KEYS[1], left > tonumber(ARGV[2]) and left or ARGV[2])
  return {2}
end
local fence, floor = redis.call('GET', KEYS[2]), redis.call('GET', KEYS[3])
local counter = math.max(tonumber(fence or 0) or math.huge, tonumber(floor or 0) or math.huge)
local t = redis.call('TIME')
local p = tonumber(ARGV[3])
if value or counter > p or p > t[1] * 1000000 + t[2] + tonumber(ARGV[4]) then return {0} end
redis.call('SET', KEYS[2], ARGV[3])
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return {1}
