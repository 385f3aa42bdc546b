-- Gives a claim back. KEYS[1] the record. ARGV[1] the run.
-- Returns 1 if it was there, else 0.
local r = redis.call('HMGET', KEYS[1], 'state', 'run')
if r[1] ~= 'running' or r[2] ~= ARGV[1] then return 0 end
return redis.call('DEL', KEYS[1])
