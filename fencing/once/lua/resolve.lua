-- Puts a result in place of whatever is there but another result. KEYS[1] the record. ARGV[1] the result, ARGV[2] how
-- long it is kept, in ms, '0' for ever.
-- Returns 1, also if this result is there already; 0 if another one is.
local r = redis.call('HMGET', KEYS[1], 'state', 'payload')
if r[1] == 'done' then return r[2] == ARGV[1] and 1 or 0 end
local now = redis.call('TIME')[1]
redis.call('HSET', KEYS[1], 'state', 'done', 'run', '', 'since', now, 'payload', ARGV[1])
if ARGV[2] ~= '0' then redis.call('PEXPIRE', KEYS[1], ARGV[2]) end
return 1
