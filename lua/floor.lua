-- Raises the floor under all fence counters of an instance; see accept.lua.
-- KEYS[1] floor
-- ARGV[1] floor, in us of the instance's clock
-- Returns the floor.
local floor = redis.call('GET', KEYS[1])
if tonumber(floor or 0) < tonumber(ARGV[1]) then redis.call('SET', KEYS[1], ARGV[1]) end
return redis.call('GET', KEYS[1])
