-- Gives the lock up if it is the owner's, and the owner's place in the queue if it is not.
-- KEYS[1] lock; then, unless the lock has no queue: KEYS[2] queue, KEYS[3] waiters, KEYS[4] fence counter
-- ARGV[1] owner value; ARGV[2] the caller's channel, on which it need not be told; ARGV[3], if given:
--         the lock stays for so many ms, under a value that is no owner's, so nothing renews or ends it
-- Returns 1 deleted, or left for that time; {1, next owner, its call, token} handed over, or left and
--         told with call 0; 0 absent; -1 somebody else's (or no lock at all).
local value = redis.pcall('GET', KEYS[1])
if type(value) == 'table' and not string.find(value.err, 'WRONGTYPE', 1, true) then return value end
local kept = ARGV[1] .. '.kept'
if ARGV[3] and value == kept then return 1 end
if value ~= ARGV[1] then
  if KEYS[2] then drop(KEYS[2], KEYS[3], ARGV[1]) end
  return value and -1 or 0
end
if ARGV[3] then
  redis.call('SET', KEYS[1], kept, 'PX', ARGV[3])
  local head = KEYS[2] and first(KEYS[2], KEYS[3])
  if not head then return 1 end
  local _, rest = alive(KEYS[3], head) -- it asks, and then knows when to ask again
  tell(rest, ARGV[2], '0 0 ' .. head)
  return {1, head, 0, '0'}
end
local handed = KEYS[2] and hand(KEYS[1], KEYS[2], KEYS[3], KEYS[4], ARGV[2])
if handed then return handed end
redis.call('DEL', KEYS[1])
return 1
