-- Tells more of a lock, beside it and for as long, if it is the owner's.
-- KEYS[1] lock; KEYS[2] description, a hash
-- ARGV[1] owner value; ARGV[2] what is told; ARGV[3] since when it is held, in ms of Unix time
-- Returns 1 told; 0 not the owner's.
if redis.pcall('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[2], 'owner', ARGV[1], 'about', ARGV[2], 'since', ARGV[3])
redis.call('PEXPIRE', KEYS[2], redis.call('PTTL', KEYS[1]))
return 1
