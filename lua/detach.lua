-- Leaves a lock to whoever attaches to it next, under a value that is no owner's: nothing renews or ends it.
-- KEYS[1] lock
-- ARGV[1] owner value; ARGV[2] ms that it is left for
-- Returns 1 left, also to a repetition; 0 absent; -1 somebody else's (or no lock at all).
local value = redis.pcall('GET', KEYS[1])
if type(value) == 'table' then
  if string.find(value.err, 'WRONGTYPE', 1, true) then return -1 end
  return value
end
local left = ARGV[1] .. '.detached'
if value == left then return 1 end
if value ~= ARGV[1] then return value and -1 or 0 end
redis.call('SET', KEYS[1], left, 'PX', ARGV[2])
return 1
