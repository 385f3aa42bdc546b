-- What most releases are: the lock is the owner's and nobody waits. It stands before all else that
-- release.lua needs, because that takes longer than this.
-- KEYS[1] lock; KEYS[2], if given: queue
-- ARGV[1] owner value; ARGV[3], if given: the lock is to stay for a while
-- Returns 1 deleted; else it goes on with release.lua.
if not ARGV[3] and redis.pcall('GET', KEYS[1]) == ARGV[1] and not (KEYS[2] and redis.pcall('EXISTS', KEYS[2]) ~= 0) then
  return redis.call('DEL', KEYS[1])
end
