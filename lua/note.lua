-- Notes that the flow of a held lock waits for another one. The record is no proof: whoever reads it looks twice.
-- KEYS[1] waits of the holders of one lock
-- ARGV[1] id of the wait; ARGV[2] what is told of it; ARGV[3] ms that it stays without being noted again
-- Returns 1.
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
if redis.call('PTTL', KEYS[1]) < tonumber(ARGV[3]) then redis.call('PEXPIRE', KEYS[1], ARGV[3]) end
return 1
