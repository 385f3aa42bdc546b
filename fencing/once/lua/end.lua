-- Ends a run. KEYS[1] the record. ARGV[1] the run, ARGV[2] the new state, ARGV[3] its payload, ARGV[4] how long a
-- result is kept, in ms, '0' for ever. A record that was lost is made again: what has been done must not be done twice.
-- Returns 1, also to a repetition; 0 if the record is not of this run any more.
local r = redis.call('HMGET', KEYS[1], 'state', 'run')
if r[1] and not (r[2] == ARGV[1] and (r[1] == 'running' or r[1] == ARGV[2])) then return 0 end
local now = redis.call('TIME')[1]
redis.call('HSET', KEYS[1], 'state', ARGV[2], 'run', ARGV[1], 'since', now, 'payload', ARGV[3])
if ARGV[2] == 'done' and ARGV[4] ~= '0' then redis.call('PEXPIRE', KEYS[1], ARGV[4]) end
return 1
