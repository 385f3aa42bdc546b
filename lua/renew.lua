-- Raises what is left of each lease to its TTL, if it is the owner's. It never
-- shortens: a renewal that runs late must not undo an Extend that was longer.
-- KEYS[i] lock; ARGV[2i-1] its owner value; ARGV[2i] its TTL in ms
-- Returns for each: 1 renewed; 0 absent; -1 somebody else's; or an error's text.
local out = {}
for i = 1, #KEYS do
  local value = redis.pcall('GET', KEYS[i])
  if type(value) == 'table' then
    out[i] = string.find(value.err, 'WRONGTYPE', 1, true) and -1 or value.err
  elseif value == ARGV[2 * i - 1] then
    local left = redis.call('PTTL', KEYS[i])
    redis.call('PEXPIRE', KEYS[i], left > tonumber(ARGV[2 * i]) and left or ARGV[2 * i])
    out[i] = 1
  else
    out[i] = value and -1 or 0
  end
end
return out
