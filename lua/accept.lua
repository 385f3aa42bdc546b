-- Takes a lock for a proposed token on one instance of a majority, if it is free and the token is new there.
-- KEYS[1] lock; KEYS[2] fence counter; KEYS[3] floor of all counters
-- ARGV[1] value: owner and token; ARGV[2] TTL in ms; ARGV[3] token; ARGV[4] how far it may be ahead of TIME, in us
-- Returns {1} taken; {2} this value has it already; {0, holder's value, PTTL in ms, counter} held;
--         {-1, counter} the token is not above the counter; {-2, TIME in us} it is too far ahead of that.
local value = redis.pcall('GET', KEYS[1])
if type(value) == 'table' then return value end
if value == ARGV[1] then return {2} end
local fence, floor = redis.call('GET', KEYS[2]), redis.call('GET', KEYS[3])
local counter = math.max(tonumber(fence or 0) or -1, tonumber(floor or 0) or -1)
if fence and not tonumber(fence) or floor and not tonumber(floor) then
  return redis.error_reply('ERR the fence counter or the floor is not a number')
end
local text = string.format('%.0f', counter)
if value then return {0, string.sub(value, 1, 256), redis.call('PTTL', KEYS[1]), text} end
if counter >= tonumber(ARGV[3]) then return {-1, text} end
local t = redis.call('TIME')
local now = t[1] * 1000000 + t[2]
if tonumber(ARGV[3]) > now + tonumber(ARGV[4]) then return {-2, string.format('%.0f', now)} end
redis.call('SET', KEYS[2], ARGV[3])
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return {1}
