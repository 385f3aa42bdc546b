-- Takes a lock that was left by detach.lua. The value changes, so one of several has it.
-- KEYS[1] lock; KEYS[2] fence counter, given only for a fenced lock, whose token stays
-- ARGV[1] value of the owner that has left it; ARGV[2] the new owner's; ARGV[3] TTL in ms
-- Returns {1, token} taken; {2, token, PTTL} the new owner's already (token '0': no counter);
--         {0, value, PTTL in ms} somebody else's, or never left; {0, '', -2} absent; an error for another type.
local value = redis.call('GET', KEYS[1])
local token = KEYS[2] and redis.call('GET', KEYS[2]) or '0'
if value == ARGV[2] then return {2, token, redis.call('PTTL', KEYS[1])} end
if value ~= ARGV[1] .. '.detached' then return {0, string.sub(value or '', 1, 256), redis.call('PTTL', KEYS[1])} end
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
return {1, token}
