"""A course made from the lessons: assignments with points, graded by their properties.

assignment  source to nbgrader's notebooks     door     what students hand in, made fit to be graded
points      how many for what                  grading  the properties of one submission, in a process of its own
circle      make, collect, autograde, feedback, export
"""
