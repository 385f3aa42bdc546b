-- Deletes the lock if it is the owner's.
-- KEYS[1] lock
-- ARGV[1] owner value
-- Returns 1 deleted; 0 absent; -1 somebody else's (or no lock at all).
local value = redis.pcall('GET', KEYS[1])
if type(value) == 'table' then
  if string.find(value.err, 'WRONGTYPE', 1, true) then return -1 end
  return value
end
if value == ARGV[1] then
  redis.call('DEL', KEYS[1])
  return 1
end
return value and -1 or 0
