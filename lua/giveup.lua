-- Gives a lock up on one instance of a majority, if it is the owner's.
-- KEYS[1] lock; KEYS[2], for a fenced lock: fence counter
-- ARGV[1] value; ARGV[2] channel of those who wait, told only if somebody listens; ARGV[3] ms that the lock
--         stays, under a value that is no owner's, '0' none; with KEYS[2]: ARGV[4] what the counter is raised to,
--         unless that is farther ahead of TIME than ARGV[5], in us, for which accept.lua does not take it
-- Returns 1 deleted, or left for that time; 0 absent; -1 somebody else's (or no lock at all).
local value = redis.pcall('GET', KEYS[1])
if type(value) == 'table' and not string.find(value.err, 'WRONGTYPE', 1, true) then return value end
if KEYS[2] then
  local fence, t = redis.pcall('GET', KEYS[2]), redis.call('TIME')
  local lower = not fence or type(fence) == 'string' and (tonumber(fence) or math.huge) < tonumber(ARGV[4])
  if lower and tonumber(ARGV[4]) <= t[1] * 1000000 + t[2] + tonumber(ARGV[5]) + 1 then
    redis.pcall('SET', KEYS[2], ARGV[4])
  end
end
local kept = ARGV[1] .. '.kept'
if ARGV[3] ~= '0' and value == kept then return 1 end
if value ~= ARGV[1] then return value and -1 or 0 end
if ARGV[3] ~= '0' then
  redis.call('SET', KEYS[1], kept, 'PX', ARGV[3])
  return 1
end
redis.call('DEL', KEYS[1])
local heard = redis.pcall('PUBSUB', 'NUMSUB', ARGV[2])[2]
if heard and heard ~= 0 then redis.pcall('PUBLISH', ARGV[2], ARGV[2]) end
return 1
