import json
import statistics
import sys

numbers = [int(line) for line in open(sys.argv[1])]
print(json.dumps({"count": len(numbers), "mean": statistics.mean(numbers), "stdev": round(statistics.stdev(numbers), 3)}))
